"""Why a job stands still although nobody ordered it to, as one node sees it."""

import math

from rallypoint.daemon.core.nodestate import NodeState


def broken_here(state: NodeState) -> str:
    """What ended the newest formed generation, as far as workers of this node show it; "" while they are
    all in it."""
    formed = state.formed_plan
    if formed is None:
        return ""
    for key in (m.key for m in formed.members if m.key.node == state.policy.node):
        slot = state.slots[key.slot]
        if slot.incarnation != key.incarnation or not slot.live:
            return f"{key} of generation {formed.generation} is gone"
        if slot.broken_generation >= formed.generation:
            return f"{key} reports generation {formed.generation} broken"
    return ""


def lease_trouble(state: NodeState, now: float) -> str:
    """That this node has not renewed its lease in time; "" while it holds it."""
    if not state.past_lease(now):
        return ""
    if state.lease_until_s == -math.inf:
        return "this node has no lease yet"
    return f"no lease since {now - state.lease_until_s:.0f} s: the store does not answer"
