"""Telling an error of the program from the loss of a worker."""

from collections.abc import Sequence

from rallypoint.daemon.core.records import FaultRecord, MemberRecord
from rallypoint.daemon.shared.plan import Plan

Place = tuple[str, int]


def program_error(members: Sequence[MemberRecord], plan: Plan | None) -> str | None:
    """Why the job fails, with the one traceback; None while nothing proves a program error.

    The same exception at the same iteration must have come from the slot of every member of the present
    plan, from one of them in the very life that the plan lists, or, while no worker gets past its
    warm-up, from every slot. Slots may have raised it in turn, each over the redo of the iteration, and in
    earlier lives: a slot's fault is forgotten when it gets past that iteration. A single slot must have
    raised it twice in a row.
    "Connection closed" is no exception of the program: workers report it as a broken generation.
    """
    faults = {(m.node, s.slot): s.fault for m in members for s in m.slots if s.fault is not None}
    if not faults:
        return None
    ran = _ran_together(members, plan, faults)
    if not ran:
        return None
    first = faults[ran[0]]
    same = {p: f for p, f in faults.items() if _signature(f) == _signature(first)}
    if any(place not in same for place in ran):
        return None
    if len(same) < 2 and first.times < 2:
        return None
    places = ", ".join(f"{node}/{slot}" for node, slot in sorted(same))
    return (
        f"program error: {first.fingerprint} at iteration {first.iteration} in every worker that ran "
        f"it ({places}), {max(len(same), first.times)} times; mend the program and start again\n"
        f"{first.traceback}"
    )


def _signature(fault: FaultRecord) -> tuple[str, int]:
    return fault.fingerprint, fault.iteration


def _ran_together(
    members: Sequence[MemberRecord], plan: Plan | None, faults: dict[Place, FaultRecord]
) -> list[Place]:
    """The slots whose workers ran what failed, if each of them has a fault; else nothing."""
    if plan is not None:
        lives = {(m.key.node, m.key.slot): m.key.incarnation for m in plan.members}
        raised = [place for place in lives if place in faults]
        now = any(faults[place].incarnation == lives[place] for place in raised)
        if now and len(raised) == len(lives):
            return raised
    slots = [(m.node, slot) for m in members for slot in m.slots]
    early = all(
        slot.fault is not None
        and slot.fault.generation == 0
        and slot.state in ("starting", "warming", "lost", "stopped", "quarantined")
        for _, slot in slots
    )
    return [(node, slot.slot) for node, slot in slots] if early else []
