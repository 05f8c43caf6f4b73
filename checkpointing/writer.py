"""Commits off the training path, in a background thread: of a snapshot that is lent to the writer.

Memory: a writer holds at most two snapshots, the one in flight and the one that waits, and beside them
what its storage holds of a file that it puts (128 MiB) and the verification of one (16 MiB).
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.manifest import CheckpointInfo, CheckpointMeta
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict, Retention, no_failpoint


@dataclass(frozen=True)
class Snapshot:
    """A state on the CPU that does not change until it is released."""

    tensors: Mapping[str, Tensor]
    scopes: Mapping[str, str]
    release: Callable[[], None] = lambda: None
    """Called once, in any thread, when nobody reads it any more."""
    stall_s: float = 0.0
    """How long the training loop stood still to take it."""


@dataclass(frozen=True)
class SaveDone:
    """A checkpoint is committed, and was read back and verified."""

    info: CheckpointInfo
    stall_s: float
    """How long the training loop stood still: to take the snapshot, and to hand it over."""
    persist_s: float
    """From the start of the write to the committed manifest."""
    verify_s: float
    """From there until everything was read back."""
    passed_over: int
    """Saves since the one before that never began: a newer one took their place while they waited."""


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint was not committed; or it was, but older ones could not be removed."""

    generation: int
    iteration: int
    error: Exception
    """Its text says what, where and why. `CommitRefused` when the supervisor did not allow it."""


@dataclass
class _Job:
    snapshot: Snapshot
    meta: CheckpointMeta
    stall_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    result: SaveDone | SaveFailed | None = None

    def failed(self, error: Exception) -> SaveFailed:
        return SaveFailed(self.meta.generation, self.meta.iteration, error)


class CheckpointWriter:
    """Saves one checkpoint at a time; the newest waiting one replaces an older waiting one.

    ``submit``, ``save_now`` and ``close`` are for one thread, the training loop's. Callbacks run in
    the writer's thread (``on_failed`` for a save that never began: in the caller's), must not
    raise and must end in bounded time: ``may_commit(generation, iteration)`` right before each
    manifest, then ``on_done`` or ``on_failed``. No failure of a save is ever raised into the
    training loop.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        may_commit: Callable[[int, int], CommitVerdict],
        on_done: Callable[[SaveDone], None],
        on_failed: Callable[[SaveFailed], None],
        keep_last: int | Retention,
        hit: Callable[[str], None] = no_failpoint,
    ) -> None:
        self._store = store
        self._may_commit = may_commit
        self._on_done = on_done
        self._on_failed = on_failed
        self._keep_last = keep_last
        self._hit = hit
        self._changed = threading.Condition()
        self._waiting: _Job | None = None
        self._in_flight: _Job | None = None
        self._passed_over = 0
        self._closed = False
        # A daemon: a store that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._loop, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot, meta: CheckpointMeta) -> float:
        """Have the snapshot saved in the background. Returns seconds of stall."""
        return self._enqueue(snapshot, meta).stall_s

    def save_now(
        self, snapshot: Snapshot, meta: CheckpointMeta, *, timeout_s: float
    ) -> SaveDone | SaveFailed:
        """As `submit`, and wait for the outcome, which the callbacks get too. After ``timeout_s``
        seconds it is a failure for the caller, though the save may still end later."""
        job = self._enqueue(snapshot, meta)
        job.ended.wait(timeout_s)
        return job.result or job.failed(
            CheckpointError(f"{self._store.url}: not committed within {timeout_s} s")
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight or waiting; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Take nothing more, drop (and report) what waits, and let the save in flight end, for at
        most ``timeout_s`` seconds."""
        with self._changed:
            self._closed = True
            dropped, self._waiting = self._waiting, None
            self._changed.notify_all()
        if dropped is not None:
            self._fail(dropped, CheckpointError("the writer was closed before this save began"))
            dropped.snapshot.release()
        self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        return self._waiting is None and self._in_flight is None

    def _enqueue(self, snapshot: Snapshot, meta: CheckpointMeta) -> _Job:
        begin_s = time.perf_counter()
        job = _Job(snapshot, meta, snapshot.stall_s)
        with self._changed:
            closed = self._closed
            replaced, self._waiting = self._waiting, None if closed else job
            self._passed_over += replaced is not None
            job.stall_s += time.perf_counter() - begin_s
            self._changed.notify_all()
        if replaced is not None:
            replaced.snapshot.release()
        if closed:
            self._fail(job, CheckpointError("the writer is closed"))
            snapshot.release()
        return job

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                job, self._waiting = self._waiting, None
                if job is None:
                    return
                self._in_flight = job
            try:
                self._perform(job)
            except Exception:  # noqa: BLE001 - a callback broke its contract: show it, go on
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            finally:
                job.ended.set()
                job.snapshot.release()
                with self._changed:
                    self._in_flight = None
                    self._changed.notify_all()

    def _perform(self, job: _Job) -> None:
        generation, iteration = job.meta.generation, job.meta.iteration
        begin_s = time.perf_counter()
        try:
            info = self._store.save(
                job.snapshot.tensors,
                job.snapshot.scopes,
                job.meta,
                may_commit=lambda: self._may_commit(generation, iteration),
                hit=self._hit,
            )
            persist_s = time.perf_counter() - begin_s
            self._store.verify_or_discard(info)
        except Exception as error:  # noqa: BLE001 - whatever it is: reported, training goes on
            self._fail(job, error)
            return
        verify_s = time.perf_counter() - begin_s - persist_s
        with self._changed:
            passed_over, self._passed_over = self._passed_over, 0
        job.result = SaveDone(info, job.stall_s, persist_s, verify_s, passed_over)
        self._on_done(job.result)
        job.ended.set()
        self._prune(job, info)

    def _prune(self, job: _Job, info: CheckpointInfo) -> None:
        try:
            pruned = self._store.prune(self._keep_last, verified=info, job=job.meta.job)
        except Exception as error:  # noqa: BLE001 - as in a save
            self._on_failed(job.failed(error))
            return
        if pruned.failed:
            self._on_failed(job.failed(CheckpointError("; ".join(pruned.failed))))

    def _fail(self, job: _Job, error: Exception) -> None:
        job.result = job.failed(error)
        job.ended.set()
        self._on_failed(job.result)
