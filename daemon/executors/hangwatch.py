"""Reads the pages of this node's workers, and hands on what `core.liveness` makes of them."""

import asyncio
import time
from collections.abc import Callable, Mapping

from rallypoint.daemon.core import liveness
from rallypoint.daemon.core.events import (
    GenerationStuck,
    NodeEvent,
    WaitsChanged,
    WorkerHung,
)
from rallypoint.daemon.core.liveness import LivenessPolicy, LivenessState
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import MemberRecord
from rallypoint.daemon.executors.neighbours import Neighbours
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotCounters


class HangWatch:
    """``readings`` reads all pages, ``node`` is the node's present state, ``neighbours`` has the records of
    all other nodes, ``emit`` takes events."""

    def __init__(
        self,
        hang_s: float,
        readings: Callable[[], Mapping[WorkerKey, SlotCounters]],
        node: Callable[[], NodeState],
        neighbours: Neighbours,
        emit: Callable[[NodeEvent], None],
    ) -> None:
        self._policy = LivenessPolicy(hang_s=hang_s, interval_s=min(1.0, hang_s / 8))
        self._readings = readings
        self._node = node
        self._neighbours = neighbours
        self._emit = emit
        self._state = LivenessState()

    async def run(self) -> None:
        """Look for ever, about once a second."""
        while True:
            await asyncio.sleep(self._policy.interval_s)
            await self._look(time.monotonic())

    async def _look(self, now: float) -> None:
        node = self._node()
        plan = node.plan
        if plan is None or node.formed == 0:
            return  # nothing has trained yet; warm-up has no peers that wait
        members = [node.key(slot) for slot in node.slots if slot.trains and node.engaged(slot)]
        pages = self._readings()
        readings = {key: pages[key] for key in members if key in pages}
        # What others say may be long over where the store cannot be reached.
        alone = node.past_lease(now) or self._neighbours.alone
        others = () if alone else await self._others_say(plan)
        self._state = liveness.observe(self._state, self._policy, readings, now, others)
        waits = () if alone else liveness.waits(self._state, self._policy, members, node.waits)
        if waits != node.waits:
            self._emit(WaitsChanged(waits))
        verdict = liveness.judge(self._state, self._policy, members, plan)
        if isinstance(verdict, liveness.Stuck):
            self._emit(GenerationStuck(verdict.generation, verdict.reason))
            return
        for hung in verdict:
            self._emit(WorkerHung(hung.key, hung.reason))

    async def _others_say(self, plan: Plan) -> tuple[MemberRecord, ...]:
        """The records of the others, where what they say can matter."""
        neighbours = self._neighbours
        if neighbours.live or liveness.asks(self._state, self._policy, plan, neighbours.leader):
            return await neighbours.refresh()
        return ()
