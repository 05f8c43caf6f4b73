"""What operators and signals ask of the supervisor: it becomes events of the node, or its end."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec
import structlog

from rallypoint.daemon.core.ending import EXIT_NOTICE
from rallypoint.daemon.core.events import (
    CheckpointAdvised,
    DrainRequested,
    NodeEvent,
    NoticeReceived,
    QuarantineCleared,
    StopRequested,
)
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.executors import status
from rallypoint.daemon.executors.membership import Membership
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.config import Config

SIGNAL_SOURCES: Final = frozenset({"slurm", "kubernetes", "signal"})
"""Values of ``preemption.sources`` with which SIGTERM and SIGUSR1 are preemption notices."""

_log = structlog.get_logger(__name__)


class Asked(Protocol):
    """Whom the questions are about: the supervisor."""

    @property
    def node_state(self) -> NodeState:
        """The node as its decisions know it now."""
        ...

    def status(self) -> dict[str, Any]:
        """The document of ``rallypoint status --json``."""
        ...

    def detach(self) -> None:
        """End, and leave the workers to the next supervisor."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do it beside everything else; its error ends the supervisor."""
        ...


class Requests:
    """The handler of the admin socket. ``emit`` queues an event, ``finish`` ends the supervisor at once
    with a code and a reason."""

    def __init__(
        self,
        config: Config,
        membership: Membership,
        metrics: Metrics,
        emit: Callable[[NodeEvent], None],
        finish: Callable[[int, str], None],
        asked: Asked,
    ) -> None:
        self._config = config
        self._membership = membership
        self._metrics = metrics
        self._emit = emit
        self._finish = finish
        self._asked = asked
        self._stops_asked = 0
        self._ends_asked_s: float | None = None

    async def status(self) -> dict[str, Any]:
        """The document of ``rallypoint status --json``, of the whole job as it is now."""
        await self._refresh()
        return self._asked.status()

    async def _refresh(self) -> None:
        if self._membership.joined:
            await self._membership.neighbours.refresh()

    @property
    def _begun(self) -> bool:
        """Whether this node has workers to agree with: it has joined, or took them over before that."""
        return self._membership.joined or self._asked.node_state.started

    def request_stop(self, reason: str) -> None:
        """Stop the job: agree, checkpoint, leave."""
        _log.info("stop_requested", reason=reason)
        self._ends_asked_s = time.monotonic()
        if self._begun:
            self._emit(StopRequested(reason))
        else:
            self._finish(0, f"{reason}: stopped before the membership store had answered")

    def request_drain(self, deadline_s: float | None) -> None:
        """Let this node leave the job; where there is no other node, the job stops."""
        _log.info("drain_requested", deadline_s=deadline_s)
        self._ends_asked_s = time.monotonic()
        if not self._membership.neighbours.alone:
            self._emit(DrainRequested(deadline_s))
            return
        self.request_stop("drained: this is the only node of the job")
        if deadline_s is not None:
            reason = f"drained by force: not over after {deadline_s:g} s"
            asyncio.get_running_loop().call_later(deadline_s, self._finish, 0, reason)

    def request_notice(self, source: str, left_s: float, text: str) -> None:
        """A preemption notice: this machine goes in ``left_s`` seconds."""
        self._metrics.add("notices_total", source=source, kind="leave")
        reason = f"preemption notice: {text}"
        _log.warning("notice_received", source=source, left_s=round(left_s, 3), reason=reason)
        if self._begun:
            self._emit(NoticeReceived(time.monotonic() + max(0.0, left_s), reason))
        else:
            self._finish(EXIT_NOTICE, f"{reason}, before the membership store had answered")

    def request_pause(self, *, paused: bool) -> str:
        """Let all workers of the job wait, warm, from the next safe point on, or go on. Why that cannot be,
        else ""."""
        job = self._membership.view.job
        if job is None or job.state not in ("running", "paused"):
            return _closed(job)
        if paused == (job.state == "paused"):
            return "the job is paused already" if paused else "the job is not paused"
        reason = f"rallypoint pause on node {self._config.node.name}" if paused else ""
        self._wish(state="paused" if paused else "running", reason=reason)
        return ""

    def request_scale(self, workers: int) -> str:
        """Change the world size of the whole job from the next safe point on. Why that cannot be, else ""."""
        job, (low, high) = self._membership.view.job, envbudget.world_size_range(self._config)
        if job is None or job.state not in ("running", "paused"):
            return _closed(job)
        if not low <= workers <= high:
            return (
                f"{workers} workers are not from job.min_workers = {low} to job.max_workers = {high}; "
                "start the job anew with other bounds"
            )
        self._wish(workers=workers)
        return ""

    def _wish(self, **changes: Any) -> None:
        _log.info("job_wish", changes=changes)
        work = self._membership.wish(lambda job: msgspec.structs.replace(job, **changes))
        self._asked.spawn(work, "wish")

    def advise_checkpoint(self, source: str, reason: str) -> None:
        """This machine may be taken away later: commit now, and stay."""
        self._metrics.add("notices_total", source=source, kind="hint")
        _log.info("checkpoint_advised", source=source, reason=reason)
        if self._membership.joined:
            self._emit(CheckpointAdvised(reason))

    def false_notice(self, source: str, reason: str) -> None:
        """The deadline of a notice is long over, and this machine is still there: stay."""
        self._metrics.add("notices_total", source=source, kind="false")
        _log.warning("notice_false", source=source, reason=reason)

    def detach(self) -> None:
        """The supervisor ends, its workers train on."""
        _log.info("detach_requested")
        self._asked.detach()

    def needs_time(self) -> bool:
        """Whether a stop or drain is under way and within `node.stop_grace_s`."""
        asked_s, grace_s = self._ends_asked_s, self._config.node.stop_grace_s
        return asked_s is not None and time.monotonic() < asked_s + grace_s

    async def quarantined(self) -> list[dict[str, Any]]:
        """Slots in quarantine on any node, as ``rallypoint quarantine list`` shows them."""
        await self._refresh()
        others = self._membership.neighbours.records()
        return status.quarantined(self._asked.node_state, time.monotonic(), others)

    async def clear_quarantine(self, node: str | None, slot: int | None) -> list[int]:
        """Let quarantined slots of a node (None: this one) start again: this slot, or all. Another node
        hears of it through the job's record."""
        name = node or self._config.node.name
        found = [entry["slot"] for entry in await self.quarantined() if entry["node"] == name]
        cleared = [number for number in found if slot in (None, number)]
        if cleared and name == self._config.node.name:
            self._emit(QuarantineCleared(slot))
        elif cleared:
            _log.info("quarantine_wish", of=name, slot=slot)
            self._asked.spawn(self._membership.wish(lambda job: _clearing(job, name, slot)), "wish")
        return cleared

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals that `on_signal` is for."""
        given = (signal.SIGTERM, signal.SIGINT)
        return (*given, signal.SIGUSR1) if self._signals_are_notices else given

    @property
    def _signals_are_notices(self) -> bool:
        return not SIGNAL_SOURCES.isdisjoint(self._config.preemption.sources)

    def on_signal(self, number: signal.Signals) -> None:
        """A preemption notice, where the configuration says so and it is not the user's own SIGINT. Else
        drain, or stop where there is no other node; the second one kills."""
        if self._signals_are_notices and number != signal.SIGINT:
            grace_s = self._config.node.stop_grace_s
            named = [s for s in self._config.preemption.sources if s in SIGNAL_SOURCES]
            source = named[0] if len(named) == 1 else "signal"  # which of several, nobody knows
            self.request_notice(source, grace_s, f"{number.name}, {grace_s:g} s left")
            return
        self._stops_asked += 1
        if self._stops_asked > 1:
            _log.warning("killed_at_once", reason=f"{number.name} while stopping")
            self._finish(0, f"{number.name} while stopping: workers were killed at once")
        elif not self._membership.neighbours.alone:
            self.request_drain(self._config.node.stop_grace_s)
        else:
            self.request_stop(number.name)

    async def stop_when_all_drain(self) -> None:
        """Whoever drains waits for others to take its state; where everybody does, the job stops."""
        await self._membership.neighbours.until_all_drain()
        self.request_stop("drained: no node is left that could take the job over")


def _clearing(job: JobRecord, node: str, slot: int | None) -> JobRecord:
    times, _ = job.clears.get(node, (0, None))
    return msgspec.structs.replace(job, clears={**job.clears, node: (times + 1, slot)})


def _closed(job: JobRecord | None) -> str:
    if job is None:
        return "the membership store has not answered yet; try again when it has"
    return f"the job is {job.state}: {job.reason}"
