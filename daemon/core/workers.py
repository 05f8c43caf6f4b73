"""The life of a worker in its slot: every event about one, start, back-off and restart."""

from rallypoint.daemon.core import ending
from rallypoint.daemon.core.actions import (
    Explain,
    KillWorker,
    NodeAction,
    SendFormedMark,
    SendPlan,
    StartWorker,
)
from rallypoint.daemon.core.errors import InvalidTransition
from rallypoint.daemon.core.events import (
    QuarantineCleared,
    SpawnFailed,
    WorkerBecameReady,
    WorkerBroke,
    WorkerCheckpointed,
    WorkerCommitted,
    WorkerConnected,
    WorkerExited,
    WorkerFaulted,
    WorkerFormed,
    WorkerHung,
    WorkerLeft,
    WorkerMisbehaved,
    WorkerSpawned,
)
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import NodeState, SlotState
from rallypoint.daemon.core.records import TRACEBACK_CHARS, FaultRecord, WorkerState

WorkerEvent = (
    WorkerSpawned
    | SpawnFailed
    | WorkerConnected
    | WorkerBecameReady
    | WorkerBroke
    | WorkerFormed
    | WorkerCommitted
    | WorkerCheckpointed
    | WorkerFaulted
    | WorkerLeft
    | WorkerHung
    | WorkerMisbehaved
    | WorkerExited
)
Decision = tuple[NodeState, tuple[NodeAction, ...]]

BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 30.0

_WARM: frozenset[WorkerState] = frozenset(
    {"ready", "training", "rebuilding", "waiting", "draining"}
)
ENGAGED: frozenset[WorkerState] = frozenset({"training", "rebuilding", "waiting", "draining"})
_CONNECTED: frozenset[WorkerState] = frozenset({"warming", *_WARM})
_LIVE: frozenset[WorkerState] = frozenset({"starting", *_CONNECTED})
_LISTED: dict[type, frozenset[WorkerState]] = {
    WorkerSpawned: frozenset({"starting"}),
    SpawnFailed: frozenset({"starting"}),
    WorkerConnected: _LIVE,
    WorkerBecameReady: _CONNECTED,
    WorkerBroke: _WARM,
    WorkerFormed: _WARM,
    WorkerCommitted: _WARM,
    WorkerCheckpointed: _WARM,
    WorkerFaulted: _CONNECTED,
    WorkerLeft: _CONNECTED,
    WorkerHung: _WARM,
    WorkerMisbehaved: _LIVE,
    WorkerExited: _LIVE,
}
"""The slot states in which each event may come. What a worker itself says may also come after its
exit was seen (it was still in the socket); then it is ignored, as is any event of an older life."""
_PROCESS_EVENTS = (WorkerSpawned, SpawnFailed, WorkerExited)
_SAID = (
    WorkerBecameReady,
    WorkerBroke,
    WorkerFormed,
    WorkerCommitted,
    WorkerCheckpointed,
    WorkerFaulted,
    WorkerLeft,
)
"""What a worker itself says. Where it may not stand, the worker's program is at fault, not ours."""


def take(state: NodeState, event: WorkerEvent, now: float) -> Decision:
    """What an event about a worker changes. Raises `InvalidTransition` when it is not listed; a worker
    that says what is not listed is ended instead."""
    key = event.key
    if key.node != state.policy.node or not 0 <= key.slot < len(state.slots):
        raise InvalidTransition(
            f"{event} is about no slot of node {state.policy.node!r}", state.recent
        )
    slot = state.slots[key.slot]
    name = type(event).__name__
    if key.incarnation < slot.incarnation:
        text = f"{name} of {key}: the slot lives its incarnation {slot.incarnation} now"
        return state, (Explain("stale_event", text),)
    known = key.incarnation == slot.incarnation
    if known and not slot.live and not isinstance(event, _PROCESS_EVENTS):
        return state, (Explain("stale_event", f"{name} of {key} came after its exit"),)
    if known and slot.misbehaved and not isinstance(event, _PROCESS_EVENTS):
        return state, (Explain("stale_event", f"{name} of {key}, which is being ended"),)
    if not known or slot.state not in _LISTED[type(event)]:
        text = (
            f"{name} of {key} while slot {slot.slot} is {slot.state!r} "
            f"in incarnation {slot.incarnation}"
        )
        if known and isinstance(event, _SAID):
            return _end_misbehaved(state, slot, text)
        raise InvalidTransition(text, state.recent)
    return _apply(state, slot, event, now)


def _apply(state: NodeState, slot: SlotState, event: WorkerEvent, now: float) -> Decision:
    match event:
        case WorkerSpawned(pid=pid):
            state = state.with_slot(slot.slot, pid=pid)
            # The kill may have been ordered before there was a process.
            again = slot.told == "leave"
            return state, (KillWorker(event.key, "the node ends"),) if again else ()
        case SpawnFailed(error=error):
            return _end_of_life(state, slot, f"could not be started: {error}", now)
        case WorkerConnected():
            return _connect(state, slot, now)
        case WorkerBecameReady():
            state = _become_ready(state, slot, event)
            late = (
                event.last_formed > slot.last_formed
            )  # adopted, and in a generation not known here
            return state, news(state, state.slots[slot.slot], now) if late else ()
        case WorkerBroke(generation=generation, capacity_envs=capacity):
            newest = max(slot.broken_generation, generation)
            current = generation >= max(1, slot.last_formed)
            shown = _shown(slot, "rebuilding") if current else slot.state
            capacity = capacity or slot.capacity_envs
            changed = state.with_slot(
                slot.slot, broken_generation=newest, state=shown, capacity_envs=capacity
            )
            return changed, ()
        case WorkerFormed():
            return _form(state, slot, event, now)
        case WorkerCommitted(iteration=iteration):
            fault = slot.fault
            if fault is not None and iteration > fault.iteration:
                fault = None
            changes = {"committed_iteration": iteration, "failures": 0, "fault": fault}
            return state.with_slot(slot.slot, **changes), ()
        case WorkerCheckpointed(generation=generation, iteration=iteration):
            return _know_checkpoint(state, slot, (generation, iteration)), ()
        case WorkerFaulted():
            return state.with_slot(slot.slot, fault=_fault(slot, event)), ()
        case WorkerLeft(reason=reason):
            state = state.with_slot(slot.slot, left=reason, state="draining")
            if reason in ("finished", "stopped"):
                return ending.agreed(state, reason, event.iteration, now)
            return state, ()
        case WorkerHung(reason=reason):
            return _end_hung(state, slot, reason)
        case WorkerMisbehaved(reason=reason):
            return _end_misbehaved(state, slot, reason)
        case WorkerExited(code=code):
            return _end_of_life(state, slot, _exit_text(event), now, crashed=code is not None)


def _end_hung(state: NodeState, slot: SlotState, reason: str) -> Decision:
    key = state.key(slot)
    if slot.hung_incarnation == slot.incarnation:
        return state, ()  # ordered already: the kill waits for the evidence
    state = state.with_slot(slot.slot, hung_incarnation=slot.incarnation)
    return state, (KillWorker(key, reason, why="hang"),)


def _end_misbehaved(state: NodeState, slot: SlotState, what: str) -> Decision:
    """End a worker that broke the protocol; its life counts as one that failed."""
    state = state.with_slot(slot.slot, misbehaved=True)
    return state, (KillWorker(state.key(slot), f"protocol fault: {what}", why="protocol"),)


def _shown(slot: SlotState, wanted: WorkerState) -> WorkerState:
    """The state to show: a worker that is on its way out stays ``draining``."""
    return "draining" if slot.state == "draining" else wanted


def _connect(state: NodeState, slot: SlotState, now: float) -> Decision:
    """Hello: a new worker starts to warm up; a known one gets what it may have missed."""
    state = state.with_slot(slot.slot, connected=True, told="", adopt_by_s=None)
    if slot.state == "starting":
        return state.with_slot(slot.slot, state="warming"), ()
    return state, news(state, state.slots[slot.slot], now)


def news(state: NodeState, slot: SlotState, now: float) -> tuple[NodeAction, ...]:
    """What a worker may have missed: the newest plan, which releases it where it is not listed and its
    own generation is over, and the mark of the generation that it formed. Nothing while this node is
    past its lease."""
    key, plan = state.key(slot), state.plan
    if plan is None or not slot.connected or state.past_lease(now):
        return ()
    actions: list[NodeAction] = [SendPlan(key, plan)]
    if slot.last_formed and slot.last_formed == state.formed:
        actions.append(SendFormedMark(key, state.formed))
    return tuple(actions)


def _become_ready(state: NodeState, slot: SlotState, event: WorkerBecameReady) -> NodeState:
    first = slot.ready_order == 0
    if first:
        state = replace(state, ready_count=state.ready_count + 1)
    state = _know_checkpoint(state, slot, event.checkpoint)
    return state.with_slot(
        slot.slot,
        state="ready" if slot.state == "warming" else slot.state,
        host=event.host,
        port=event.port,
        device=event.device,
        capacity_envs=event.capacity_envs,
        ready_order=state.ready_count if first else slot.ready_order,
        last_formed=max(slot.last_formed, event.last_formed),
    )


def _know_checkpoint(
    state: NodeState, slot: SlotState, checkpoint: tuple[int, int] | None
) -> NodeState:
    state = replace(state, checkpoint=_newest(state.checkpoint, checkpoint))
    return state.with_slot(slot.slot, checkpoint=_newest(slot.checkpoint, checkpoint))


def _newest(*checkpoints: tuple[int, int] | None) -> tuple[int, int] | None:
    return max((c for c in checkpoints if c is not None), default=None)


def _form(state: NodeState, slot: SlotState, event: WorkerFormed, now: float) -> Decision:
    """A generation is formed here. A mark that was written already is passed on at once."""
    key, generation = event.key, event.generation
    newest = state.plan
    plan = next((p for p in state.plans if p.generation == generation), None)
    member = None if plan is None else plan.find(key)
    if newest is None or generation > newest.generation or (plan is not None and member is None):
        text = f"it formed generation {generation}, but no plan seen has it there"
        return _end_misbehaved(state, slot, text)
    if plan is None or member is None:
        text = f"{key} formed generation {generation}, long after plan {newest.generation}"
        return state, (Explain("stale_event", text),)
    now_in: WorkerState = "waiting" if plan.hold else "training"
    if newest.generation > generation and newest.kind == "forced":
        now_in = "rebuilding"
    state = state.with_slot(
        slot.slot,
        state=_shown(slot, now_in),
        last_formed=max(slot.last_formed, generation),
        blocks=member.blocks,
        committed_iteration=event.iteration,
    )
    marked = state.formed == generation and not state.past_lease(now)
    return state, (SendFormedMark(key, generation),) if marked else ()


def _fault(slot: SlotState, event: WorkerFaulted) -> FaultRecord:
    before = slot.fault
    again = (
        before is not None
        and (before.fingerprint, before.iteration) == (event.fingerprint, event.iteration)
        and before.incarnation < event.key.incarnation
    )
    return FaultRecord(
        incarnation=event.key.incarnation,
        generation=event.generation,
        iteration=event.iteration,
        fingerprint=event.fingerprint,
        times=before.times + 1 if before is not None and again else 1,
        traceback=event.traceback[-TRACEBACK_CHARS:],
    )


# --- start and restart ---------------------------------------------------------------------------


def start(state: NodeState, index: int) -> Decision:
    """Begin the next life of a slot."""
    old = state.slots[index]
    new = SlotState(
        slot=old.slot,
        incarnation=old.incarnation + 1,
        state="starting",
        restarts=old.restarts,
        failures=old.failures,
        fault=old.fault,
        hung_incarnation=old.hung_incarnation,
    )
    slots = (*state.slots[:index], new, *state.slots[index + 1 :])
    state = replace(state, slots=slots)
    return state, (StartWorker(state.key(new)),)


def restart_due(state: NodeState, now: float) -> Decision:
    """Begin every life whose back-off is over."""
    actions: list[NodeAction] = []
    for index, slot in enumerate(state.slots):
        if slot.restart_at_s is not None and slot.restart_at_s <= now:
            state, more = start(state, index)
            actions += more
    return state, tuple(actions)


def _end_of_life(
    state: NodeState, slot: SlotState, what: str, now: float, *, crashed: bool = True
) -> Decision:
    """The process is gone. Restart at once, or after a back-off when lives end before they form, or
    crash (end by themselves, not by a signal) before they commit anything; quarantine when that does
    not end."""
    index, key = slot.slot, state.key(slot)
    state = state.with_slot(
        index,
        state="stopped" if slot.left else "lost",
        pid=None,
        connected=False,
        rank=None,
        adopt_by_s=None,
    )
    if state.ending is not None:
        return state, (Explain("worker_gone", f"{key} {what}; not restarted: the node ends"),)
    failed = not slot.left and (crashed or slot.misbehaved or not slot.last_formed)
    failures = slot.failures + (1 if failed else 0)
    delay_s = _backoff_s(failures) if failed else 0.0
    text = f"{key} {what}"
    if failed and failures >= state.policy.quarantine_after:
        delay_s = state.policy.quarantine_cooldown_s
        state = state.with_slot(index, state="quarantined", quarantined_for=what)
        text = f"{text}; quarantined"
    state = state.with_slot(
        index, failures=failures, restarts=slot.restarts + 1, restart_at_s=now + delay_s
    )
    text = (
        f"{text}; restart in {delay_s:g} s ({failures} lives in a row failed before they trained)"
    )
    return state, (Explain("worker_gone", text),)


def clear_quarantine(state: NodeState, event: QuarantineCleared) -> Decision:
    """Let quarantined slots start again at once, with nothing held against them."""
    actions: list[NodeAction] = []
    for index, slot in enumerate(state.slots):
        if slot.state == "quarantined" and event.slot in (None, slot.slot):
            state = state.with_slot(index, failures=0)
            actions.append(Explain("quarantine_cleared", f"slot {slot.slot}"))
            if state.ending is None:
                state, more = start(state, index)
                actions += more
    return state, tuple(actions)


def _backoff_s(failures: int) -> float:
    """The first restart comes at once; then 0.5 s, doubled each time, at most 30 s."""
    if failures <= 1:
        return 0.0
    return float(min(BACKOFF_FIRST_S * 2.0 ** min(failures - 2, 16), BACKOFF_MOST_S))


def _exit_text(event: WorkerExited) -> str:
    if event.signal is not None:
        how = f"was ended by signal {event.signal}"
    elif event.code is not None:
        how = f"exited with code {event.code}"
    else:
        how = "is gone"
    return f"{how} ({event.reason})" if event.reason else how
