"""How a node comes to its end: stop, finish, drain, or a failed job."""

from typing import Literal

from rallypoint.daemon.core.actions import (
    ExitSupervisor,
    Explain,
    KillWorker,
    NodeAction,
    SendCheckpoint,
    SendLeave,
    SendStop,
)
from rallypoint.daemon.core.events import DrainRequested, NoticeReceived
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import Ending, NodeState, SlotState
from rallypoint.daemon.core.records import JobRecord

Decision = tuple[NodeState, tuple[NodeAction, ...]]

EXIT_NOTICE = 75
_MARGIN_MOST_S = 5.0
"""Force comes this long before a deadline, or a sixth of the time where that is less: what it takes to
end workers, write the books and give up the lease on a busy machine."""


def stop(state: NodeState, reason: str, now: float) -> Decision:
    """The operator stops the job: whoever trains agrees, checkpoints and leaves."""
    if state.ending is not None and state.ending.kind != "drain":
        return state, (Explain("stop_ignored", f"the node ends already: {state.ending.reason}"),)
    ending = Ending("stop", _code(state), reason, _grace_s(state, now))
    return replace(state, ending=ending), ()


def agreed(state: NodeState, reason: str, iteration: int, now: float) -> Decision:
    """A worker left because all agreed that the job is finished or stopped: so will the others."""
    before, shared = state.ending, not state.policy.alone
    if before is not None and before.kind != "drain":
        awaits = before.awaits_job or (shared and before.kind == "stop")
        return replace(state, ending=replace(before, awaits_job=awaits)), ()
    text = f"the job was {reason} by agreement at iteration {iteration}"
    code = 0 if reason == "finished" else _code(state)
    ending = Ending("finish", code, text, _grace_s(state, now), awaits_job=shared)
    return replace(state, ending=ending), ()


def job_ended(state: NodeState, job: JobRecord, now: float) -> Decision:
    """The job record says failed or finished."""
    before = state.ending
    # A drain may wait for a plan, which does not come any more: it is bounded now.
    bounded = before is not None and before.kind != "drain"
    if before is not None and (before.kind == "fail" or (bounded and job.state == "finished")):
        return state, ()
    deadline_s = _grace_s(state, now)
    if job.state == "failed":
        ending = Ending("fail", 1, job.reason, deadline_s)
    else:
        text = f"the job is finished: {job.reason}"
        ending = Ending("finish", _code(state), text, deadline_s)
    return replace(state, ending=ending), ()


def _grace_s(state: NodeState, now: float) -> float:
    """Until when workers may agree and leave: never past a deadline that is known already."""
    grace_s = now + state.policy.stop_grace_s
    known_s = None if state.ending is None else state.ending.deadline_s
    return grace_s if known_s is None else min(grace_s, known_s)


def _code(state: NodeState) -> int:
    """Exit code of a node that leaves as it was asked to."""
    return EXIT_NOTICE if state.drain_cause == "notice" else 0


def drain(state: NodeState, event: DrainRequested, now: float) -> Decision:
    """This node leaves; a repeated request can only bring the deadline nearer."""
    before = state.ending
    forced_s = None if event.deadline_s is None else _forced_s(now + event.deadline_s, now)
    if before is not None and before.kind != "drain":
        ending = _sooner(before, forced_s)
        text = f"the node ends already: {before.reason}"
        return replace(state, ending=ending), (Explain("drain_while_ending", text),)
    seconds = state.drain_seconds if event.deadline_s is None else event.deadline_s
    state = replace(state, drain_cause=state.drain_cause or "drain", drain_seconds=seconds)
    reason = "drained: drain" if before is None else before.reason
    ending = Ending("drain", _code(state), reason, _nearer(before, forced_s))
    return replace(state, ending=ending), ()


def notice(state: NodeState, event: NoticeReceived, now: float) -> Decision:
    """The machine goes: leave at the next safe point, by force before the deadline. Rank 0 commits first,
    since nobody may be there to take its state. Where there is no other node, the job stops here."""
    before, forced_s = state.ending, _forced_s(event.deadline_s, now)
    if before is not None and before.kind != "drain":
        ending = _sooner(before, forced_s)
        text = f"{event.reason}; the node ends already: {before.reason}"
        return replace(state, ending=ending), (Explain("notice_while_ending", text),)
    first = state.drain_cause != "notice"
    state = replace(state, drain_cause="notice", drain_seconds=max(0.0, event.deadline_s - now))
    kind: Literal["stop", "drain"] = "stop" if state.policy.alone else "drain"
    ending = Ending(kind, EXIT_NOTICE, event.reason, _nearer(before, forced_s))
    orders = commit_first(state, event.reason) if first else ()
    return replace(state, ending=ending), orders


def commit_first(state: NodeState, reason: str) -> tuple[NodeAction, ...]:
    """The order to rank 0 to commit, if it is here and trains: whoever holds the last state is led by it."""
    plan = state.formed_plan
    for slot in state.slots if plan is not None else ():
        key = state.key(slot)
        if plan is not None and key == plan.rank0.key and slot.connected and not slot.left:
            return (SendCheckpoint(key, reason),)
    return (Explain("checkpoint_not_ordered", f"{reason}: rank 0 is not a worker of this node"),)


def _forced_s(deadline_s: float, now: float) -> float:
    """When force comes, for a deadline."""
    return deadline_s - min(_MARGIN_MOST_S, max(0.0, deadline_s - now) / 6)


def _nearer(before: Ending | None, forced_s: float | None) -> float | None:
    known = (None if before is None else before.deadline_s, forced_s)
    return min((at_s for at_s in known if at_s is not None), default=None)


def _sooner(before: Ending, forced_s: float | None) -> Ending:
    """The end that is under way, at ``forced_s`` at the latest."""
    asked = before.asked or forced_s is not None
    return replace(before, deadline_s=_nearer(before, forced_s), asked=asked)


def proceed(state: NodeState, now: float) -> Decision:
    """Tell every worker what the end asks of it: once, and again after it reconnects."""
    ending = state.ending
    if ending is None:
        return state, ()
    actions: list[NodeAction] = []
    for index, slot in enumerate(state.slots):
        wanted = _wanted(state, ending, slot)
        if not slot.live or wanted in ("", slot.told) or slot.told == "leave" or slot.left:
            continue
        if slot.adopt_by_s is not None:
            continue  # it trains, and will be told when it has said Hello
        key, reason = state.key(slot), ending.reason
        state = state.with_slot(index, told=wanted)
        if not slot.connected:
            actions.append(KillWorker(key, f"it holds nothing, and the node ends: {reason}"))
            continue
        state = state.with_slot(index, state="draining")
        stops = wanted == "stop"
        actions.append(SendStop(key, "stopped") if stops else SendLeave(key, "drained"))
    all_told = all(slot.told == "leave" for slot in state.slots if slot.live)
    if ending.deadline_s is None and all_told:
        bounded = replace(ending, deadline_s=now + state.policy.stop_grace_s)
        state = replace(state, ending=bounded)
    return state, tuple(actions)


def _wanted(state: NodeState, ending: Ending, slot: SlotState) -> Literal["", "stop", "leave"]:
    """What a worker is to be told. One that trains leaves by agreement, or when a plan without it has
    formed. One whose state counts for nothing has nothing to agree on, and in a failed job nobody."""
    counts = slot.last_formed >= max(1, state.formed) and state.engaged(slot)
    if ending.kind == "fail" or not counts:
        return "leave"
    return "stop" if ending.kind == "stop" else ""


def due_s(state: NodeState) -> float | None:
    """When the end comes by force; None: it has no bound yet. Where only the record of the job is waited
    for, and nobody has asked this node to be gone by then, the store gets its time once more after it
    was away: its leader may have to be elected first."""
    ending = state.ending
    if ending is None or ending.deadline_s is None:
        return None
    asked = ending.kind != "finish" or ending.asked or state.drain_cause
    if asked or not _open_job_awaited(state, ending) or any(slot.live for slot in state.slots):
        return ending.deadline_s
    return max(ending.deadline_s, state.leased_since_s + state.policy.stop_grace_s)


def _open_job_awaited(state: NodeState, ending: Ending) -> bool:
    """Whether the end that was agreed is not in the job's record yet."""
    return ending.awaits_job and (state.job is None or state.job.state in ("running", "paused"))


def leave_if_over(state: NodeState, now: float) -> Decision:
    """Order the exit when every worker is gone, or by force when it is due."""
    ending = state.ending
    if ending is None:
        return state, ()
    left = [slot for slot in state.slots if slot.live]
    # While the store is away, or has no leader yet, all stay who know of the end, as long as a stop may
    # take: else those who only wait to enter would never hear of it.
    forced_s = due_s(state)
    late = forced_s is not None and now >= forced_s
    if (left or _open_job_awaited(state, ending)) and not late:
        return state, ()
    actions: list[NodeAction] = [
        KillWorker(state.key(slot), f"still there at the deadline of the end: {ending.reason}")
        for slot in left
    ]
    actions.append(ExitSupervisor(ending.code, ending.reason))
    return replace(state, ending=replace(ending, exited=True)), tuple(actions)
