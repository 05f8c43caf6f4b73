"""Carrying out the orders of the node and of the leader. What they bring about becomes events."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, assert_never

import structlog

from rallypoint.daemon.core import actions
from rallypoint.daemon.core.events import LeaderEvent, NodeEvent, PublishRefused, TimerFired
from rallypoint.daemon.executors import persist
from rallypoint.daemon.executors.membership import Membership
from rallypoint.daemon.executors.persist import StateFile
from rallypoint.daemon.executors.probe import probe
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.executors.workers import Workers
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.daemon.shared.plan import Plan, WorkerKey

Machine = Literal["node", "leader"]

_log = structlog.get_logger(__name__)


class Performer:
    """``emit`` queues an event for a machine; ``finish`` ends the supervisor."""

    def __init__(
        self,
        *,
        node_name: str,
        workers: Workers,
        membership: Membership,
        recorder: Recorder,
        state: StateFile,
        failpoints: Failpoints,
        emit: Callable[[Machine, NodeEvent | LeaderEvent], None],
        finish: Callable[[int, str], None],
        spawn: Callable[[Any, str], None],
    ) -> None:
        self._node_name = node_name
        self._workers = workers
        self._membership = membership
        self._recorder = recorder
        self._state = state
        self._failpoints = failpoints
        self._emit = emit
        self._finish = finish
        self._spawn = spawn
        self._timers: dict[Machine, asyncio.TimerHandle] = {}

    async def node(self, action: actions.NodeAction) -> None:
        """Carry out an order of the node."""
        send = self._workers.control.send
        match action:
            case actions.SetTimer(at_s=at_s):
                self._set_timer("node", at_s)
            case actions.Explain(event=event, reason=reason):
                _log.info(event, reason=reason)
            case actions.StartWorker(key=key):
                # Soon, not now: survivors must not wait for a newcomer's fork.
                asyncio.get_running_loop().call_soon(self._workers.start, key)
            case actions.KillWorker(key=key, reason=reason, why="hang"):
                self._spawn(self._workers.kill_hung(key, reason), "evidence")
            case actions.KillWorker(key=key, reason=reason, why=why):
                self._workers.kill(key, reason, why)
            case actions.WriteMember(record=record):
                self._membership.set_member(record)
            case actions.SendPlan(key=key, plan=plan):
                send(key, messages.PlanPublished(plan=plan))
            case actions.SendFormedMark(key=key, generation=generation):
                send(key, messages.FormedMark(generation=generation))
            case actions.SendStop(key=key, reason=reason):
                send(key, messages.StopAfterIteration(reason=reason))
            case actions.SendCheckpoint(key=key, reason=reason):
                _log.info("checkpoint_ordered", worker=key, reason=reason)
                send(key, messages.CommitNow(reason=reason))
            case actions.SendLeave(key=key, reason=reason):
                send(key, messages.Leave(reason=reason))
            case actions.ExitSupervisor(code=code, reason=reason):
                self._finish(code, reason)
            case _:
                assert_never(action)

    async def leader(self, action: actions.LeaderAction) -> None:
        """Carry out an order of the leader."""
        match action:
            case actions.SetTimer(at_s=at_s):
                self._set_timer("leader", at_s)
            case actions.Explain(event=event, reason=reason):
                _log.info(event, reason=reason)
            case actions.ProbeMembers():
                self._spawn(self._probe(action), "probe")
            # Writes are tasks: the store may not answer for long, and decisions do not wait for it.
            case actions.PublishPlan(plan=plan, replaces=replaces):
                self._spawn(self._publish(plan, replaces), "publish")
            case actions.MarkFormed(generation=generation):
                self._failpoints.hit(
                    "supervisor_mark_formed", iteration=self._recorder.iteration + 1
                )
                self._spawn(self._membership.mark_formed(generation, self._progress()), "mark")
            case actions.RecordCheckpoint(checkpoint=checkpoint):
                progress = self._progress()
                progress["iteration"] = max(checkpoint[1], progress.get("iteration", 0))
                work = self._membership.update_job(checkpoint=checkpoint, **progress)
                self._spawn(work, "checkpoint record")
            case actions.SetJobState(state=state, reason=reason):
                _log.info("job_state", state=state, reason=reason)
                changes = {"state": state, "reason": reason, **self._progress()}
                self._spawn(self._membership.update_job(**changes), "job state")
            case _:
                assert_never(action)

    def close(self) -> None:
        """Drop all timers."""
        for timer in self._timers.values():
            timer.cancel()

    async def _publish(self, plan: Plan, replaces: int) -> None:
        """The plan is on disk before anybody can see it: its number is never given out again, and
        the next supervisor can go on from it."""
        try:
            self._state.update(**persist.with_plan(self._state.state, plan))
        except OSError as error:
            reason = f"generation {plan.generation} could not be written to disk: {error.strerror}"
            _log.error("state_write_failed", path=str(self._state.path), reason=reason)
            self._emit("leader", PublishRefused(plan.generation, reason))
            return
        self._failpoints.hit("supervisor_publish", iteration=self._recorder.iteration + 1)
        await self._membership.publish(plan, replaces)

    def _progress(self) -> dict[str, int]:
        """What this node knows of the job's progress: nothing while no worker of it takes part."""
        if not self._recorder.takes_part:
            return {}
        return {"iteration": self._recorder.iteration, "env_steps": self._recorder.env_steps}

    def _set_timer(self, machine: Machine, at_s: float) -> None:
        if machine in self._timers:
            self._timers[machine].cancel()
        loop = asyncio.get_running_loop()
        self._timers[machine] = loop.call_at(at_s, self._emit, machine, TimerFired())

    async def _probe(self, order: actions.ProbeMembers) -> None:
        targets = {key: self._address(key) for key in order.targets}
        self._emit("leader", await probe(order.probe, targets, order.bound_s))

    def _address(self, key: WorkerKey) -> tuple[str, int] | None:
        """Where the worker listens; None when it is known to be gone."""
        if key.node == self._node_name and self._workers.is_gone(key):
            return None
        return self._membership.view.address(key)
