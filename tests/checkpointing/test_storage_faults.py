"""A store that fails in every way: nothing committed is lost, it is said, and the next commit heals."""

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.checkpointing import objects
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE
from rallypoint.checkpointing.objects import BLOCK_BYTES, FsspecStorage
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.checkpointing.writer import SaveDone, SaveFailed
from tests.checkpointing.samples import assert_state, newest
from tests.checkpointing.test_checkpoint_writer import BOUND_S, Harness
from tests.fakes.faulty_fs import FaultyFileSystem, ProviderError


@pytest.fixture
def fs() -> Iterator[type[FaultyFileSystem]]:
    """The file system, empty and in good health."""
    FaultyFileSystem.reset()
    yield FaultyFileSystem
    FaultyFileSystem.reset()


@pytest.fixture
def harness(fs: type[FaultyFileSystem]) -> Iterator[Harness]:
    """A writer to it that has committed iteration 1."""
    harness = Harness(CheckpointStore("unused", storage=FsspecStorage("faulty://bucket/x")))
    assert isinstance(harness.save_now(1), SaveDone)
    yield harness
    fs.heal()
    harness.answer.set()
    harness.writer.close(BOUND_S)


def raising(
    error: Callable[[], Exception], operation: str = "", name: str = ""
) -> Callable[[str, str], None]:
    """A fault of one kind of operation on one kind of file, or of all."""

    def fault(what: str, path: str) -> None:
        if operation in ("", what) and path.endswith(name):
            raise error()

    return fault


ANSWERS: dict[str, Callable[[], Exception]] = {
    "down": lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    "timeout": lambda: TimeoutError("no answer within 15 s"),
    "5xx": lambda: ProviderError("503 Service Unavailable"),
    "throttled": lambda: OSError(errno.EBUSY, "SlowDown: Please reduce your request rate"),
    "credential expired": lambda: PermissionError("ExpiredToken: the token has expired"),
    "clock skew": lambda: PermissionError("RequestTimeTooSkewed: the difference is too large"),
    "disk full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "permission lost": lambda: PermissionError(errno.EACCES, "AccessDenied"),
    "bucket removed": lambda: FileNotFoundError("The specified bucket does not exist"),
}


@pytest.mark.parametrize("where", ["", "put state", "put manifest", "stat", "get", "list"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_an_error_costs_that_commit_alone(
    harness: Harness, fs: type[FaultyFileSystem], answer: str, where: str
) -> None:
    operation, _, file = where.partition(" ")
    name = {"state": STATE_FILE, "manifest": MANIFEST_FILE}.get(file, "")
    fs.fault = staticmethod(raising(ANSWERS[answer], operation, name))
    result = harness.save_now(2)
    assert harness.writer.flush(BOUND_S)
    assert fs.fired > 0
    # Without a listing nothing can be pruned; that is said, after the success.
    problems = [o for o in harness.outcomes if isinstance(o, SaveFailed)]
    assert problems
    assert isinstance(result, SaveDone if operation == "list" else SaveFailed)
    words = str(ANSWERS[answer]()).partition("] ")[2] or str(ANSWERS[answer]())
    assert words in str(problems[0].error)
    fs.heal()
    assert newest(harness.store).manifest.iteration in (1, 2)
    assert isinstance(harness.save_now(3), SaveDone)
    assert_state(newest(harness.store), 3)
    assert newest(harness.store).skipped == ()


def test_what_cannot_be_cleaned_up_now_is_collected_later(
    harness: Harness, fs: type[FaultyFileSystem]
) -> None:
    """Down from the manifest on: data without a manifest stays, until a later commit."""
    fs.fault = staticmethod(
        lambda what, path: (
            raising(ANSWERS["down"])(what, path)
            if what == "remove" or path.endswith(MANIFEST_FILE)
            else None
        )
    )
    assert isinstance(harness.save_now(2), SaveFailed)
    assert [i.iteration for i in harness.store.list()] == [1]
    assert len([path for path in fs.store if path.endswith(STATE_FILE)]) == 2
    fs.heal()
    assert isinstance(harness.save_now(3), SaveDone)
    assert harness.writer.flush(BOUND_S)
    assert len([path for path in fs.store if path.endswith(STATE_FILE)]) == 2
    assert [i.iteration for i in harness.store.list()] == [3, 1]


def flipped(path: str, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 4])


def cut(path: str, data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("name", [STATE_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("change", [flipped, cut], ids=["bit flip", "truncated put"])
def test_what_does_not_arrive_whole_is_found_before_anybody_trusts_it(
    harness: Harness,
    fs: type[FaultyFileSystem],
    change: Callable[[str, bytes], bytes],
    name: str,
) -> None:
    fs.change = staticmethod(lambda path, data: change(path, data) if path.endswith(name) else data)
    result = harness.save_now(2)
    assert fs.fired > 0
    assert isinstance(result, SaveFailed)
    assert_state(newest(harness.store), 1)
    assert newest(harness.store).skipped == (), "nothing damaged is left behind"
    fs.heal()
    assert isinstance(harness.save_now(3), SaveDone)
    assert_state(newest(harness.store), 3)


def test_a_stale_listing_hides_and_never_harms(
    harness: Harness, fs: type[FaultyFileSystem]
) -> None:
    stale = FsspecStorage("faulty://bucket/x")._connect()[0].find("/bucket/x", detail=True)
    harness.save_now(2)
    fs.stale = stale
    assert_state(newest(harness.store), 1)
    assert isinstance(harness.save_now(3), SaveDone)
    assert harness.writer.flush(BOUND_S)
    assert fs.fired > 0
    fs.stale = None
    assert [info.iteration for info in harness.store.list()] == [3, 2, 1]
    assert_state(newest(harness.store), 3)
    fs.stale = {**fs_listing(fs), "/bucket/x/gone/manifest.json": {"size": 1}}
    assert_state(newest(harness.store), 3)


def fs_listing(fs: type[FaultyFileSystem]) -> dict[str, Any]:
    return {path: {"size": file.size} for path, file in fs.store.items()}


def test_a_slow_store_holds_nobody_up_and_the_newest_state_waits(
    harness: Harness, fs: type[FaultyFileSystem]
) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def wait(what: str, path: str) -> None:
        if what == "put" and not go_on.is_set():
            arrived.set()
            assert go_on.wait(BOUND_S)

    fs.fault = staticmethod(wait)
    harness.submit(2)
    assert arrived.wait(BOUND_S)
    for iteration in (3, 4, 5):
        harness.submit(iteration)
    assert harness.held == [2, 5]
    go_on.set()
    assert harness.done() == [1, 2, 5]


def test_half_a_stream_is_never_completed(
    fs: type[FaultyFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store goes down after the first block."""
    monkeypatch.setattr(objects, "WHOLE_BYTES", BLOCK_BYTES)
    storage = FsspecStorage("faulty://bucket/x")
    closed: list[bool] = []

    class Stream:
        """A file of a backend that takes one block."""

        written = 0
        closed = False

        def write(self, data: bytes) -> int:
            self.written += len(data)
            if self.written > BLOCK_BYTES:
                raise ProviderError("503 Service Unavailable")
            return len(data)

        def close(self) -> None:
            closed.append(True)

        def discard(self) -> None:
            closed.append(False)

    connected = storage._connect()[0]
    connected.open = lambda path, mode, **kwargs: Stream()
    with pytest.raises(OSError, match="ProviderError: 503 Service Unavailable"):
        storage.create("d", "a", (b"x" * BLOCK_BYTES, b"y" * BLOCK_BYTES))
    assert closed == [False]
