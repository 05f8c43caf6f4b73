"""How a node comes to its end: stop, finish, drain, or a failed job."""

from typing import Literal

from rallypoint.daemon.core.actions import (
    ExitSupervisor,
    Explain,
    KillWorker,
    NodeAction,
    SendLeave,
    SendStop,
)
from rallypoint.daemon.core.events import DrainRequested
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import Ending, NodeState, SlotState
from rallypoint.daemon.core.records import JobRecord

Decision = tuple[NodeState, tuple[NodeAction, ...]]

EXIT_NOTICE = 75
_MARGIN_MOST_S = 1.0
"""Force comes this long before a deadline, or a tenth of the time where that is less."""


def stop(state: NodeState, reason: str, now: float) -> Decision:
    """The operator stops the job: whoever trains agrees, checkpoints and leaves."""
    if state.ending is not None and state.ending.kind != "drain":
        return state, (Explain("stop_ignored", f"the node ends already: {state.ending.reason}"),)
    ending = Ending("stop", 0, reason, now + state.policy.stop_grace_s)
    return replace(state, ending=ending), ()


def agreed(state: NodeState, reason: str, iteration: int, now: float) -> Decision:
    """A worker left because all agreed that the job is finished or stopped: so will the others."""
    before, shared = state.ending, state.policy.end_wait_s > 0
    if before is not None and before.kind != "drain":
        awaits = before.awaits_job or (shared and before.kind == "stop")
        return replace(state, ending=replace(before, awaits_job=awaits)), ()
    text = f"the job was {reason} by agreement at iteration {iteration}"
    deadline_s = now + state.policy.stop_grace_s
    ending = Ending("finish", 0, text, deadline_s, awaits_job=shared)
    return replace(state, ending=ending), ()


def job_ended(state: NodeState, job: JobRecord, now: float) -> Decision:
    """The job record says failed or finished."""
    before = state.ending
    if before is not None and (before.kind == "fail" or job.state == "finished"):
        return state, ()
    deadline_s = now + state.policy.stop_grace_s
    if before is not None and before.deadline_s is not None:
        deadline_s = min(deadline_s, before.deadline_s)
    if job.state == "failed":
        ending = Ending("fail", 1, job.reason, deadline_s)
    else:
        ending = Ending("finish", 0, f"the job is finished: {job.reason}", deadline_s)
    return replace(state, ending=ending), ()


def drain(state: NodeState, event: DrainRequested, now: float) -> Decision:
    """This node leaves; a repeated request can only bring the deadline nearer."""
    before = state.ending
    if before is not None and before.kind != "drain":
        return state, (Explain("drain_ignored", f"the node ends already: {before.reason}"),)
    deadline_s = before.deadline_s if before is not None else None
    if event.deadline_s is not None:
        forced_s = now + event.deadline_s - min(_MARGIN_MOST_S, event.deadline_s / 10)
        deadline_s = forced_s if deadline_s is None else min(deadline_s, forced_s)
    notice = event.cause == "notice" or state.drain_cause == "notice"
    cause: Literal["drain", "notice"] = "notice" if notice else "drain"
    ending = Ending("drain", EXIT_NOTICE if notice else 0, f"drained: {event.cause}", deadline_s)
    seconds = state.drain_seconds if event.deadline_s is None else event.deadline_s
    return replace(state, ending=ending, drain_cause=cause, drain_seconds=seconds), ()


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


def leave_if_over(state: NodeState, now: float) -> Decision:
    """Order the exit when every worker is gone, or by force at the deadline."""
    ending = state.ending
    if ending is None:
        return state, ()
    left = [slot for slot in state.slots if slot.live]
    waits = ending.awaits_job and (state.job is None or state.job.state == "running")
    if waits and not left:
        wait_until_s = now + state.policy.end_wait_s
        ending = replace(ending, deadline_s=min(ending.deadline_s or wait_until_s, wait_until_s))
        state = replace(state, ending=ending)
    late = ending.deadline_s is not None and now >= ending.deadline_s
    if (left or waits) and not late:
        return state, ()
    actions: list[NodeAction] = [
        KillWorker(state.key(slot), f"still there at the deadline of the end: {ending.reason}")
        for slot in left
    ]
    actions.append(ExitSupervisor(ending.code, ending.reason))
    return replace(state, ending=replace(ending, exited=True)), tuple(actions)
