"""A supervisor without a worker process: the decisions, membership and store of a real one, and a worker
that is nothing but a listening port and does at once what it is told.

The leader writes each plan to its disk before it publishes it. What the others write when they have
seen it is left out: each has a disk of its own, and here they would all wait for one.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import leader, node
from rallypoint.daemon.executors import persist, policies
from rallypoint.daemon.executors.membershipview import encode
from rallypoint.daemon.executors.openstore import open_membership
from rallypoint.daemon.executors.perform import Machine
from rallypoint.daemon.executors.probe import probe
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_BACKLOG: Final = 4096
"""Connections of probes wait in the port's queue: nobody accepts them, as each is closed at once."""

Fact = Literal["plan", "mark"]
Seen = Callable[[Fact, int, int, float], None]
"""(what, generation, its world size, monotonic time)."""


@dataclass
class LightNode:
    """One life of a node. ``seen`` is told of each plan and each formed mark as the node has it."""

    config: Config
    directory: Path
    versions: dict[str, str]
    seen: Seen

    async def start(self) -> None:
        """Join the store, and have a worker that is ready."""
        rundir = RunDir(self.directory)
        rundir.path.mkdir(parents=True, exist_ok=True)
        self._state = persist.open_state(rundir, self.config, self.versions, None, fresh=False)
        state = self._state.state
        self._node = node.initial(policies.node_policy(self.config, state, self.versions))
        self._leader = leader.initial(policies.leader_policy(self.config))
        self._queue: asyncio.Queue[tuple[Machine, ev.NodeEvent | ev.LeaderEvent]] = asyncio.Queue()
        self._timers: dict[Machine, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._port: socket.socket | None = None
        self._world_sizes: dict[int, int] = {}
        self._membership = open_membership(
            self.config, state, self.versions, self._emit, lambda *call: None, fresh=False
        )
        job = persist.first_job(state, self.config, self.versions)
        await self._membership.join(job)
        job = self._membership.view.job or job
        self._node = node.of_job(self._node, job.uid, self._membership.neighbours.port)
        self._emit(ev.NodeStarted())
        for work in (
            self._membership.follow(),
            self._membership.relist(),
            self._membership.keep_lease(),
            self._membership.tend(),
            self._decide(),
        ):
            self._spawn(work)

    async def end(self, *, silently: bool) -> None:
        """End it, all at once. ``silently``: its lease stays, as after a SIGKILL; else it is revoked, as
        if it had run out this moment."""
        if self._port is not None:
            self._port.close()
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if silently:
            self._membership.neighbours.close()
        else:
            await self._membership.leave()

    def break_generation(self, generation: int) -> None:
        """Its worker saw a peer's connection close."""
        self._emit(ev.WorkerBroke(self._key, generation, "connection closed by peer"))

    @property
    def leads(self) -> bool:
        """Whether it is the leader."""
        return self._leader.job is not None

    @property
    def plan_bytes(self) -> int:
        """Size of the newest plan as it is in the store."""
        plan = self._membership.view.plan
        return 0 if plan is None else len(encode(plan))

    @property
    def _key(self) -> WorkerKey:
        return self._node.key(self._node.slots[0])

    # --- decisions ------------------------------------------------------------------------------

    def _emit(self, event: ev.NodeEvent | ev.LeaderEvent) -> None:
        self._queue.put_nowait(("node" if isinstance(event, ev.NodeEvent) else "leader", event))

    async def _decide(self) -> None:
        while True:
            machine, event = await self._queue.get()
            if machine == "node":
                self._decide_node(event)  # type: ignore[arg-type]
            else:
                self._decide_leader(event)  # type: ignore[arg-type]

    def _decide_leader(self, event: ev.LeaderEvent) -> None:
        self._leader, orders = leader.decide(self._leader, event, time.monotonic())
        for order in orders:
            self._lead(order)

    def _decide_node(self, event: ev.NodeEvent) -> None:
        if isinstance(event, ev.WorkerBroke):
            self._spawn(self._membership.doubt_leader())
        self._node, orders = node.decide(self._node, event, time.monotonic())
        for order in orders:
            self._carry_out(order)
        if isinstance(event, ev.PlanSeen):
            plan = event.plan
            self._world_sizes[plan.generation] = plan.world_size
            self.seen("plan", plan.generation, plan.world_size, time.monotonic())
        elif isinstance(event, ev.JobSeen):
            formed = event.job.formed
            self.seen("mark", formed, self._world_sizes.get(formed, 0), time.monotonic())

    def _carry_out(self, order: act.NodeAction) -> None:
        match order:
            case act.SetTimer(at_s=at_s):
                self._set_timer("node", at_s)
            case act.StartWorker(key=key):
                self._start_worker(key)
            case act.WriteMember(record=record):
                self._membership.set_member(record)
            case act.SendPlan(key=key, plan=plan) if plan.find(key) is not None:
                self._emit(ev.WorkerFormed(key, plan.generation, "", 0))
            case _:
                pass  # the worker has nothing to do about it

    def _start_worker(self, key: WorkerKey) -> None:
        node_section = self.config.node
        self._port = socket.create_server((node_section.bind, 0), backlog=_BACKLOG)
        self._emit(ev.WorkerSpawned(key, 1))
        self._emit(ev.WorkerConnected(key))
        port = self._port.getsockname()[1]
        self._emit(ev.WorkerBecameReady(key, node_section.advertise, port, "cpu", 0, 0, None))

    def _lead(self, order: act.LeaderAction) -> None:
        membership = self._membership
        match order:
            case act.SetTimer(at_s=at_s):
                self._set_timer("leader", at_s)
            case act.ProbeMembers():
                self._spawn(self._probe(order))
            case act.PublishPlan(plan=plan, replaces=replaces):
                self._spawn(self._publish(plan, replaces))
            case act.MarkFormed(generation=generation):
                self._spawn(_quietly(membership.mark_formed(generation, {})))
            case act.SetJobState(state=state, reason=reason):
                self._spawn(membership.update_job(state=state, reason=reason))
            case _:
                pass  # explanations; and there are no checkpoints

    async def _publish(self, plan: Plan, replaces: int) -> None:
        state = self._state.state
        job = self._membership.view.job or state.job
        self._state.update(job=job, **persist.with_plan(state, plan))
        await self._membership.publish(plan, replaces)

    async def _probe(self, order: act.ProbeMembers) -> None:
        view = self._membership.view
        targets = {key: view.address(key) for key in order.targets}
        self._emit(await probe(order.probe, targets, order.bound_s))

    # --- small ----------------------------------------------------------------------------------

    def _set_timer(self, machine: Machine, at_s: float) -> None:
        if machine in self._timers:
            self._timers[machine].cancel()
        loop = asyncio.get_running_loop()
        fired = (machine, ev.TimerFired())
        self._timers[machine] = loop.call_at(at_s, self._queue.put_nowait, fired)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _quietly(work: Coroutine[Any, Any, bool]) -> None:
    await work
