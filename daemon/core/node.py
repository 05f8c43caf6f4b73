"""One node: its slots, the life of their workers, and what is said to them."""

from dataclasses import replace

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
    DrainRequested,
    GenerationStuck,
    JobSeen,
    NodeEvent,
    NodeStarted,
    PlanSeen,
    QuarantineCleared,
    StopRequested,
    TimerFired,
)
from rallypoint.daemon.core.nodestate import PLANS_KEPT, NodeState, SlotState
from rallypoint.daemon.core.policy import NodePolicy
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import Plan

Decision = tuple[NodeState, tuple[NodeAction, ...]]


def initial(policy: NodePolicy) -> NodeState:
    """A node that has started nothing yet."""
    slots = (SlotState(slot, policy.first_incarnation) for slot in range(policy.slots))
    return NodeState(policy, tuple(slots))


def decide(state: NodeState, event: NodeEvent, now: float) -> Decision:
    """What the node does about one event at monotonic time ``now``.

    Raises `InvalidTransition` for an event that its state does not list. Once the order to exit was
    given, nothing is decided any more.
    """
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
            return _see_plan(state, plan)
        case JobSeen(job=job):
            return _see_job(state, job, now)
        case QuarantineCleared():
            return workers.clear_quarantine(state, event)
        case GenerationStuck():
            return _form_anew(state, event)
        case StopRequested(reason=reason):
            return ending.stop(state, reason, now)
        case DrainRequested():
            return ending.drain(state, event, now)
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
                state, more = workers.start(state, index)
                actions += more
    return state, tuple(actions)


def _see_plan(state: NodeState, plan: Plan) -> Decision:
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
    actions: list[NodeAction] = []
    for index, slot in enumerate(state.slots):
        member = plan.find(state.key(slot))
        active = slot.state in ("training", "rebuilding", "waiting", "draining")
        if slot.connected and (member is not None or active):
            actions.append(SendPlan(state.key(slot), plan))
        state = state.with_slot(index, rank=None if member is None else member.rank)
        if member is not None and plan.kind == "forced" and slot.state in ("training", "waiting"):
            state = state.with_slot(index, state="rebuilding")
    return state, tuple(actions)


def _see_job(state: NodeState, job: JobRecord, now: float) -> Decision:
    """Pass a new formed mark on; end when the job has."""
    risen = job.formed > state.formed
    state = replace(state, job=job)
    actions: list[NodeAction] = []
    if risen:
        actions += [
            SendFormedMark(state.key(slot), job.formed)
            for slot in state.slots
            if slot.connected and slot.last_formed == job.formed
        ]
    if job.state in ("failed", "finished"):
        state, more = ending.job_ended(state, job, now)
        actions += more
    return state, tuple(actions)


def _form_anew(state: NodeState, event: GenerationStuck) -> Decision:
    """All of a generation wait for each other: say that it is broken, and end nobody."""
    generation = event.generation
    if state.plan is None or state.plan.generation != generation:
        text = f"generation {generation} was stuck, but a newer plan is out"
        return state, (Explain("stale_event", text),)
    for index, slot in enumerate(state.slots):
        if slot.live and state.plan.find(state.key(slot)) is not None:
            newest = max(slot.broken_generation, generation)
            state = state.with_slot(index, broken_generation=newest, stuck_generation=generation)
    return state, (Explain("generation_stuck", event.reason),)


def _settle(state: NodeState, now: float) -> Decision:
    """What follows from the state itself, whatever the event was."""
    for index, slot in enumerate(state.slots):
        if slot.state in ("training", "rebuilding", "waiting") and not state.engaged(slot):
            state = state.with_slot(index, state="ready")  # left out: warm, waits for a later plan
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
    wakes = [slot.adopt_by_s for slot in state.slots]
    if state.ending is None:
        wakes += [slot.restart_at_s for slot in state.slots]
    elif state.ending.exited:
        return None
    else:
        wakes.append(state.ending.deadline_s)
    return min((at_s for at_s in wakes if at_s is not None), default=None)
