"""What is known of committed checkpoints, for status, metrics and log."""

import functools
import math
import time
from pathlib import Path

import structlog

from rallypoint.daemon.executors.books import Books, CheckpointFact
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared import messages

_log = structlog.get_logger(__name__)


class Checkpoints:
    """Of all tiers the newest, and of each tier when it last took one."""

    def __init__(self, metrics: Metrics) -> None:
        self.newest: CheckpointFact | None = None
        self.tiers: dict[str, float] = {}
        """Unix time of the newest commit to each tier that had one."""
        self._metrics = metrics
        metrics.compute("checkpoint_age_seconds", self.age_s)
        for tier in messages.TIERS:
            metrics.compute(
                "checkpoint_tier_age_seconds", functools.partial(self._tier_age_s, tier), tier=tier
            )

    def resume(self, books: Books) -> None:
        """Go on from the books of the supervisor before."""
        self.newest, self.tiers = books.checkpoint, dict(books.tiers)

    def age_s(self) -> float:
        """Since the newest checkpoint, by the calendar; NaN where there is none."""
        return math.nan if self.newest is None else time.time() - self.newest.at_unix_s

    def _tier_age_s(self, tier: str) -> float:
        return time.time() - self.tiers.get(tier, math.nan)

    def done(self, message: messages.CheckpointDone, now_unix_s: float) -> None:
        """One is committed. A tier that takes long may end an older one than another tier has."""
        fact = CheckpointFact(message.generation, message.iteration, message.path, now_unix_s)
        if self.newest is None or fact.order >= self.newest.order:
            self.newest = fact
        if message.tier is not None:
            self.tiers[message.tier] = now_unix_s
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
        )

    def failed(self, message: messages.CheckpointFailed) -> None:
        """One could not be committed, or a store could not be read."""
        self._metrics.add("checkpoint_failures_total")
        if message.tier is not None:
            self._metrics.add("checkpoint_tier_failures_total", tier=message.tier)
        _log.error(
            "checkpoint_failed",
            worker=str(message.key),
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
        self.newest = CheckpointFact(message.generation, message.iteration, message.path, at_unix_s)
        _log.info("checkpoint_restored", iteration=message.iteration, path=message.path)
        for skipped in message.skipped:
            _log.error("checkpoint_skipped", reason=skipped)
