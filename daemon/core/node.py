"""One node: its slots, the life of their workers, and what is said to them."""

import math

from rallypoint.daemon.core import adoption, ending, workers
from rallypoint.daemon.core.actions import (
    Explain,
    NodeAction,
    SendFormedMark,
    SendPlan,
    SetTimer,
    WriteMember,
)
from rallypoint.daemon.core.errors import InvalidTransition, remember
from rallypoint.daemon.core.events import (
    CheckpointAdvised,
    DrainRequested,
    GenerationStuck,
    JobSeen,
    LeaseKept,
    NodeEvent,
    NodeStarted,
    NoticeReceived,
    PlanSeen,
    QuarantineCleared,
    StopRequested,
    TimerFired,
    WaitsChanged,
)
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import PLANS_KEPT, NodeState, SlotState
from rallypoint.daemon.core.policy import NodePolicy
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import Plan

Decision = tuple[NodeState, tuple[NodeAction, ...]]


def initial(policy: NodePolicy) -> NodeState:
    """A node that has started nothing yet."""
    slots = (SlotState(slot, policy.first_incarnation) for slot in range(policy.slots))
    return NodeState(policy, tuple(slots))


def of_job(state: NodeState, uid: str, port: int) -> NodeState:
    """This node once it has been taken into a job that others may have begun, before it starts; ``port``
    is where they can ask whether it lives."""
    return replace(state, policy=replace(state.policy, job_uid=uid, port=port))


def without_lease(state: NodeState) -> NodeState:
    """This node before its store has answered: it commits nothing and enters nothing, but its workers of
    before train on."""
    return replace(state, lease_until_s=-math.inf)


def decide(state: NodeState, event: NodeEvent, now: float) -> Decision:
    """What the node does about one event at monotonic time ``now``.

    Raises `InvalidTransition` for an event that its state does not list. Once the order to exit was
    given, nothing is decided any more.
    """
    if isinstance(event, LeaseKept) and not state.past_lease(now):
        return replace(state, lease_until_s=event.deadline_s), ()  # each second: nothing changes
    state = replace(state, recent=remember(state.recent, event, now))
    if state.ending is not None and state.ending.exited:
        return state, ()
    state, first = _take(state, event, now)
    state, second = _settle(state, now)
    return state, (*first, *second)


def _take(state: NodeState, event: NodeEvent, now: float) -> Decision:
    match event:
        case NodeStarted():
            return _start_all(state, event, now)
        case PlanSeen(plan=plan):
            return _see_plan(state, plan, now)
        case JobSeen(job=job):
            return _see_job(state, job, now)
        case QuarantineCleared():
            return _clear_quarantine(state, event)
        case LeaseKept(deadline_s=deadline_s):
            return _regain_lease(state, deadline_s, now)
        case GenerationStuck():
            return _form_anew(state, event)
        case WaitsChanged(waits=waits):
            return replace(state, waits=waits), ()
        case StopRequested(reason=reason):
            return ending.stop(state, reason, now)
        case DrainRequested():
            return ending.drain(state, event, now)
        case NoticeReceived():
            return ending.notice(state, event, now)
        case CheckpointAdvised(reason=reason):
            return state, ending.commit_first(state, reason)
        case TimerFired():
            return replace(state, timer_at_s=None), ()
        case _:
            return workers.take(state, event, now)


def _start_all(state: NodeState, event: NodeStarted, now: float) -> Decision:
    if state.started:
        raise InvalidTransition("the node was started twice", state.recent)
    state = replace(state, started=True)
    for worker in event.adopted:
        state = adoption.adopt(state, worker, now)
    adopted = {worker.key.slot for worker in event.adopted}
    actions: list[NodeAction] = []
    if state.ending is None:
        for index in range(len(state.slots)):
            if index not in adopted:
                lives = max(state.slots[index].incarnation, _last_planned(state, index))
                state, more = workers.start(state.with_slot(index, incarnation=lives), index)
                actions += more
    return state, tuple(actions)


def _last_planned(state: NodeState, slot: int) -> int:
    """The newest life of a slot that a plan names, 0 for none. A node that has lost its directory counts
    lives from 1 again: a new worker must not have the name of one that others still know."""
    named = (worker.key for plan in state.plans for worker in (*plan.members, *plan.left_out))
    lives = (k.incarnation for k in named if (k.node, k.slot) == (state.policy.node, slot))
    return max(lives, default=0)


def _see_plan(state: NodeState, plan: Plan, now: float) -> Decision:
    """Hand a new plan to its workers, and to those that it releases from an older generation."""
    newest = state.plan
    if newest is not None and plan.generation <= newest.generation:
        if plan.generation == newest.generation and plan != newest:
            raise InvalidTransition(
                f"two different plans of generation {plan.generation}: {newest} and {plan}",
                state.recent,
            )
        text = f"plan {plan.generation} is not newer than {newest.generation}, the newest seen"
        return state, (Explain("plan_known", text),)
    state = replace(state, plans=(*state.plans, plan)[-PLANS_KEPT:])
    if state.formed == plan.generation:
        state = replace(state, formed_plan=plan)
    state, said = _count_omission(state, newest, plan, now)
    actions: list[NodeAction] = [*said]
    for index, slot in enumerate(state.slots):
        member = plan.find(state.key(slot))
        active = slot.state in workers.ENGAGED
        if slot.connected and (member is not None or active) and not state.past_lease(now):
            actions.append(SendPlan(state.key(slot), plan))
        state = state.with_slot(index, rank=None if member is None else member.rank)
        if member is not None and plan.kind == "forced" and slot.state in ("training", "waiting"):
            state = state.with_slot(index, state="rebuilding")
    return state, tuple(actions)


def _see_job(state: NodeState, job: JobRecord, now: float) -> Decision:
    """Pass a new formed mark on; end when the job has."""
    risen = job.formed > state.formed
    asked, before = job.clears.get(state.policy.node), state.job
    state = replace(state, job=job)
    actions: list[NodeAction] = []
    if asked is not None and before is not None and asked != before.clears.get(state.policy.node):
        state, orders = _clear_quarantine(state, QuarantineCleared(asked[1]))
        actions += orders
    if risen:
        formed = next((p for p in state.plans if p.generation == job.formed), None)
        state = replace(state, formed_plan=formed)
    if risen and not state.past_lease(now):
        actions += [
            SendFormedMark(state.key(slot), job.formed)
            for slot in state.slots
            if slot.connected and slot.last_formed == job.formed
        ]
    if job.state in ("failed", "finished"):
        state, more = ending.job_ended(state, job, now)
        actions += more
    return state, tuple(actions)


def _regain_lease(state: NodeState, deadline_s: float, now: float) -> Decision:
    """The lease had run out: what was withheld meanwhile is said now."""
    state = replace(state, lease_until_s=deadline_s, leased_since_s=now)
    return state, tuple(order for slot in state.slots for order in workers.news(state, slot, now))


def _count_omission(state: NodeState, before: Plan | None, plan: Plan, now: float) -> Decision:
    """A node that is left out of one forced plan after the other, although its survivors live, costs the
    others more than it gives: its network flaps. Its workers are then not let in for a while. A newcomer
    is left out of every forced plan, and one worker alone is no sign of the network."""
    if before is None or plan.kind != "forced" or state.ending is not None:
        return state, ()
    trained = [s for s in state.slots if s.state in ("training", "rebuilding", "waiting")]
    survivors = [s for s in trained if s.last_formed and s.last_formed >= plan.formed]
    keys = [key for slot in survivors if before.find(key := state.key(slot)) is not None]
    if not keys or any(plan.find(key) is not None for key in keys):
        return state, ()
    recent = now - state.omitted_at_s < state.policy.quarantine_cooldown_s
    state = replace(state, omissions=state.omissions + 1 if recent else 1, omitted_at_s=now)
    if state.omissions < state.policy.quarantine_after:
        return state, ()
    cooldown_s = state.policy.quarantine_cooldown_s
    state = replace(state, quarantined_until_s=now + cooldown_s)
    text = f"{state.quarantine}; not let in for {cooldown_s:g} s, or until the operator clears it"
    return state, (Explain("node_quarantined", text),)


def _clear_quarantine(state: NodeState, event: QuarantineCleared) -> Decision:
    """A slot that crashes again and again, or the node that flaps, with all of its slots."""
    crashed = any(s.slot == event.slot and s.state == "quarantined" for s in state.slots)
    said: tuple[NodeAction, ...] = ()
    if state.quarantined_until_s is not None and not crashed:
        state = replace(state, omissions=0, quarantined_until_s=None)
        said = (Explain("quarantine_cleared", "this node"),)
    state, orders = workers.clear_quarantine(state, event)
    return state, (*said, *orders)


def _form_anew(state: NodeState, event: GenerationStuck) -> Decision:
    """All of a generation wait for each other: say that it is broken, and end nobody."""
    generation, plan = event.generation, state.plan
    # A planned change never comes to its safe point when the generation before it stands still.
    awaited = plan is not None and plan.kind == "planned" and generation == state.formed
    if plan is None or (plan.generation != generation and not awaited):
        text = f"generation {generation} was stuck, but a newer plan is out"
        return state, (Explain("stale_event", text),)
    for index, slot in enumerate(state.slots):
        if slot.live and plan.find(state.key(slot)) is not None:
            newest = max(slot.broken_generation, generation)
            state = state.with_slot(index, broken_generation=newest, stuck_generation=generation)
    return state, (Explain("generation_stuck", event.reason),)


def _settle(state: NodeState, now: float) -> Decision:
    """What follows from the state itself, whatever the event was."""
    for index, slot in enumerate(state.slots):
        if slot.state in ("training", "rebuilding", "waiting") and not state.engaged(slot):
            state = state.with_slot(index, state="ready")  # left out: warm, waits for a later plan
    if state.quarantined_until_s is not None and state.quarantined_until_s <= now:
        state = replace(state, quarantined_until_s=None)
    state, late = adoption.overdue(state, now)
    state, orders = workers.restart_due(state, now) if state.ending is None else (state, ())
    state, more = ending.proceed(state, now)
    actions: list[NodeAction] = [*late, *orders, *more]
    record = state.record()
    if state.started and record != state.member:
        state = replace(state, member=record)
        actions.append(WriteMember(record))
    state, last = ending.leave_if_over(state, now)
    actions += last
    wake_s = _next_wake(state)
    if wake_s != state.timer_at_s:
        state = replace(state, timer_at_s=wake_s)
        if wake_s is not None:
            actions.append(SetTimer(wake_s))
    return state, tuple(actions)


def _next_wake(state: NodeState) -> float | None:
    wakes: list[float | None] = [slot.adopt_by_s for slot in state.slots]
    if state.ending is None:
        wakes += [slot.restart_at_s for slot in state.slots]
        wakes.append(state.quarantined_until_s)
    elif state.ending.exited:
        return None
    else:
        wakes.append(ending.due_s(state))
    return min((at_s for at_s in wakes if at_s is not None), default=None)
