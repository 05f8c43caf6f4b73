"""What is known of committed checkpoints, for status, metrics and log."""

import functools
import math
import time
from collections import deque
from pathlib import Path
from typing import Final

import structlog

from rallypoint.daemon.executors.books import Books, CheckpointFact
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared import messages

_PERIODS: Final = 5
_log = structlog.get_logger(__name__)


class Checkpoints:
    """Of all tiers the newest, and of each tier when it last took one."""

    def __init__(self, metrics: Metrics) -> None:
        self.newest: CheckpointFact | None = None
        self.tiers: dict[str, float] = {}
        """Unix time of the newest commit to each tier that had one."""
        self._metrics = metrics
        self._order: tuple[int, int] | None = None
        """(generation, iteration) of the newest that is known, whichever node wrote it."""
        self._at_s = math.nan
        """When that was, by this machine's monotonic clock."""
        self._periods: deque[float] = deque(maxlen=_PERIODS)
        metrics.compute("checkpoint_age_seconds", lambda: time.monotonic() - self._at_s)
        for name in ("checkpoint_iteration", "checkpoint_period_seconds", "checkpoint_size_bytes"):
            metrics.set(name, math.nan)
        for tier in messages.TIERS:
            metrics.compute(
                "checkpoint_tier_age_seconds", functools.partial(self._tier_age_s, tier), tier=tier
            )

    def resume(self, books: Books) -> None:
        """Go on from the books of the supervisor before."""
        self.tiers = dict(books.tiers)
        if books.checkpoint is not None:
            self._found(books.checkpoint)

    def heard(self, order: tuple[int, int] | None) -> None:
        """The job's record names this one as its newest; None: it names none."""
        now = time.monotonic()
        if order is None or (self._order is not None and order <= self._order):
            return
        if not math.isnan(self._at_s):
            self._periods.append(now - self._at_s)
            self._metrics.set("checkpoint_period_seconds", max(self._periods))
        self._is_newest(order, now)

    def _found(self, fact: CheckpointFact) -> None:
        """The newest one is of a time before this supervisor: only the calendar knows how old it is."""
        self.newest = fact
        self._is_newest(fact.order, time.monotonic() - max(0.0, time.time() - fact.at_unix_s))

    def _is_newest(self, order: tuple[int, int], at_s: float) -> None:
        self._order, self._at_s = order, at_s
        self._metrics.set("checkpoint_iteration", order[1])

    def _tier_age_s(self, tier: str) -> float:
        return time.time() - self.tiers.get(tier, math.nan)

    def done(self, message: messages.CheckpointDone, now_unix_s: float) -> None:
        """One is committed. A tier that takes long may end an older one than another tier has."""
        fact = CheckpointFact(message.generation, message.iteration, message.path, now_unix_s)
        if self.newest is None or fact.order >= self.newest.order:
            self.newest = fact
            self.heard(fact.order)
            self._metrics.set("checkpoint_size_bytes", message.size_bytes)
        if message.tier is not None:
            self.tiers[message.tier] = now_unix_s
            self._metrics.add(
                "checkpoint_passed_over_total", message.passed_over, tier=message.tier
            )
        self._metrics.observe("checkpoint_stall_seconds", message.stall_s)
        self._metrics.observe("checkpoint_persist_seconds", message.persist_s)
        _log.info(
            "checkpoint_committed",
            iteration=message.iteration,
            path=message.path,
            tier=message.tier,
            bytes=message.size_bytes,
            stall_s=round(message.stall_s, 4),
            persist_s=round(message.persist_s, 4),
            passed_over=message.passed_over,
        )

    def failed(self, message: messages.CheckpointFailed) -> None:
        """One could not be committed, or a store could not be read."""
        self._metrics.add("checkpoint_failures_total")
        if message.tier is not None:
            self._metrics.add("checkpoint_tier_failures_total", tier=message.tier)
        _log.error(
            "checkpoint_failed",
            worker=message.key,
            iteration=message.iteration,
            tier=message.tier,
            error=message.error,
        )

    def restored(self, message: messages.Restored, now_unix_s: float) -> None:
        """The job goes on from this one."""
        try:
            at_unix_s = (Path(message.path) / "manifest.json").stat().st_mtime
        except OSError:
            at_unix_s = now_unix_s  # not a local file: its age counts from now
        fact = CheckpointFact(message.generation, message.iteration, message.path, at_unix_s)
        self._found(fact)
        _log.info("checkpoint_restored", iteration=message.iteration, path=message.path)
        for skipped in message.skipped:
            _log.error("checkpoint_skipped", reason=skipped)
