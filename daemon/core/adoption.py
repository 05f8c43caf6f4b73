"""Workers that an earlier supervisor of this node left training: they keep their slots.

Until one has said Hello it is presumed to be where the plans put it, so that nobody takes it for lost
meanwhile; one that says nothing within the bound is ended, and that is an ordinary loss.
"""

from rallypoint.daemon.core.actions import KillWorker, NodeAction
from rallypoint.daemon.core.events import AdoptedWorker
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import NodeState, SlotState
from rallypoint.daemon.core.records import WorkerState
from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey


def adopt(state: NodeState, worker: AdoptedWorker, now: float) -> NodeState:
    """The slot of an adopted worker, as the plans say. Raises nothing: the executor took only
    workers of this node's slots."""
    key = worker.key
    slot = SlotState(
        slot=key.slot,
        incarnation=key.incarnation,
        state="starting",
        pid=worker.pid,
        adopt_by_s=now + state.policy.adopt_s,
    )
    formed = next((p for p in state.plans if p.generation == state.formed), None)
    was, will_be = _member(formed, key), _member(state.plan, key)
    member = will_be or was
    if member is not None:
        slot = replace(
            slot,
            state="ready",
            host=member.host,
            port=member.port,
            capacity_envs=member.capacity_envs,
            rank=None if will_be is None else will_be.rank,
        )
    if formed is not None and was is not None:
        # A generation is marked formed only when every member has formed it.
        slot = replace(
            slot,
            state=_state(formed, state.plan, will_be),
            last_formed=formed.generation,
            blocks=was.blocks,
        )
    slots = (*state.slots[: key.slot], slot, *state.slots[key.slot + 1 :])
    return replace(state, slots=slots)


def _member(plan: Plan | None, key: WorkerKey) -> PlannedWorker | None:
    return None if plan is None else plan.find(key)


def _state(formed: Plan, newest: Plan | None, will_be: PlannedWorker | None) -> WorkerState:
    if newest is not None and newest is not formed and newest.kind == "forced" and will_be:
        return "rebuilding"
    return "waiting" if formed.hold else "training"


def overdue(state: NodeState, now: float) -> tuple[NodeState, tuple[NodeAction, ...]]:
    """End every adopted worker that has not said Hello in time."""
    orders: list[NodeAction] = []
    for index, slot in enumerate(state.slots):
        if slot.adopt_by_s is not None and slot.adopt_by_s <= now:
            state = state.with_slot(index, adopt_by_s=None)
            text = f"adopted, but it said nothing within {state.policy.adopt_s:g} s"
            orders.append(KillWorker(state.key(slot), text))
    return state, tuple(orders)
