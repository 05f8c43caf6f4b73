"""The background writer: what the training loop hands over, and what it is told."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from rallypoint.checkpointing.errors import CheckpointError, CommitRefused, NonFiniteState
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE
from rallypoint.checkpointing.storage import Buffer, LocalStorage
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from rallypoint.checkpointing.writer import CheckpointWriter, SaveDone, SaveFailed, Snapshot
from tests.checkpointing.samples import (
    FullDisk,
    ReadOnlyRemoval,
    assert_state,
    meta,
    newest,
    scopes,
    state,
)

BOUND_S = 30.0


class Harness:
    """A writer, the outcomes it told, and a supervisor whose answers a test can hold back."""

    def __init__(self, store: CheckpointStore, keep_last: int = 3) -> None:
        self.store = store
        self.outcomes: list[SaveDone | SaveFailed] = []
        self.held: list[int] = []
        """Iterations whose snapshots the writer holds."""
        self.asked: list[tuple[int, int]] = []
        self.verdict = CommitVerdict(True)
        self.answer = threading.Event()
        self.answer.set()
        self.being_asked = threading.Event()
        self.writer = CheckpointWriter(
            store,
            may_commit=self._may_commit,
            on_done=self.outcomes.append,
            on_failed=self.outcomes.append,
            keep_last=keep_last,
        )

    def _may_commit(self, generation: int, iteration: int) -> CommitVerdict:
        self.asked.append((generation, iteration))
        self.being_asked.set()
        assert self.answer.wait(BOUND_S)
        return self.verdict

    def snapshot(self, iteration: int) -> Snapshot:
        """A state that is lent; what is given back is noted."""
        self.held.append(iteration)
        tensors = state(iteration)
        return Snapshot(tensors, scopes(tensors), lambda: self.held.remove(iteration))

    def submit(self, iteration: int) -> float:
        return self.writer.submit(self.snapshot(iteration), meta(iteration))

    def save_now(self, iteration: int, timeout_s: float = BOUND_S) -> SaveDone | SaveFailed:
        return self.writer.save_now(self.snapshot(iteration), meta(iteration), timeout_s=timeout_s)

    def hold_first(self) -> None:
        """Hand over iteration 1, and wait until its commit stands at the question."""
        self.answer.clear()
        self.submit(1)
        assert self.being_asked.wait(BOUND_S)

    def done(self) -> list[int]:
        """Iterations committed, in order."""
        assert self.writer.flush(BOUND_S)
        return [o.info.iteration for o in self.outcomes if isinstance(o, SaveDone)]

    def failures(self) -> list[tuple[int, Exception]]:
        assert self.writer.flush(BOUND_S)
        return [(o.iteration, o.error) for o in self.outcomes if isinstance(o, SaveFailed)]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A writer to a fresh local store."""
    harness = Harness(CheckpointStore(str(tmp_path)))
    yield harness
    harness.answer.set()
    harness.writer.close(BOUND_S)


def test_a_snapshot_is_saved_and_given_back(harness: Harness) -> None:
    stall_s = harness.submit(1)
    assert harness.done() == [1]
    assert_state(newest(harness.store), 1)
    (outcome,) = harness.outcomes
    assert isinstance(outcome, SaveDone)
    assert outcome.stall_s == stall_s > 0
    assert outcome.persist_s > 0
    assert outcome.verify_s > 0
    assert harness.asked == [(1, 1)]
    assert harness.held == []


def test_the_writer_holds_two_snapshots_at_most(harness: Harness) -> None:
    harness.hold_first()
    for iteration in (2, 3, 4):
        harness.submit(iteration)
        assert harness.held == [1, iteration]
    harness.answer.set()
    assert harness.done() == [1, 4]
    assert harness.held == []


def test_the_newest_waiting_save_replaces_an_older_waiting_one(harness: Harness) -> None:
    harness.hold_first()
    for iteration in (2, 3, 4):
        harness.submit(iteration)
    harness.answer.set()
    assert harness.done() == [1, 4]
    harness.submit(5)
    assert harness.done() == [1, 4, 5]
    passed_over = [o.passed_over for o in harness.outcomes if isinstance(o, SaveDone)]
    assert passed_over == [2, 0, 0], "told once, with the one that they waited for"
    for info, iteration in zip(harness.store.list(), (5, 4, 1), strict=True):
        loaded, _ = harness.store.load_newest([info])
        assert loaded is not None
        assert_state(loaded, iteration)


def test_a_state_of_another_layout_is_saved_whole(harness: Harness) -> None:
    harness.submit(1)
    assert harness.done() == [1]
    other = {"policy/weight": torch.ones(2, dtype=torch.float64)}
    harness.writer.submit(Snapshot(other, scopes(other)), meta(2))
    assert harness.done() == [1, 2]
    assert torch.equal(newest(harness.store).tensors["policy/weight"], other["policy/weight"])


def test_save_now_returns_once_it_is_committed(harness: Harness) -> None:
    result = harness.save_now(5)
    assert isinstance(result, SaveDone)
    assert harness.outcomes == [result]
    assert newest(harness.store).info == result.info
    assert_state(newest(harness.store), 5)


def test_save_now_waits_for_the_one_in_flight_and_replaces_the_waiting(harness: Harness) -> None:
    harness.hold_first()
    harness.submit(2)
    release = threading.Timer(0.05, harness.answer.set)
    release.start()
    assert isinstance(harness.save_now(3), SaveDone)
    release.join()
    assert harness.done() == [1, 3]


def test_save_now_does_not_wait_for_ever(harness: Harness) -> None:
    harness.hold_first()
    result = harness.save_now(2, timeout_s=0.01)
    assert isinstance(result, SaveFailed)
    assert "not committed within 0.01 s" in str(result.error)
    assert not harness.writer.flush(0.01)
    harness.answer.set()
    assert harness.done() == [1, 2], "late, it still ends"


def test_a_refusal_is_reported_and_the_next_one_asks_again(harness: Harness) -> None:
    harness.verdict = CommitVerdict(False, "lease past its deadline by 1.2 s")
    result = harness.save_now(1)
    assert isinstance(result, SaveFailed)
    assert isinstance(result.error, CommitRefused)
    assert "lease past its deadline by 1.2 s" in str(result.error)
    harness.verdict = CommitVerdict(True)
    assert isinstance(harness.save_now(2), SaveDone)
    assert harness.asked == [(1, 1), (1, 2)]


@pytest.mark.parametrize("file", [STATE_FILE, MANIFEST_FILE])
def test_a_full_disk_is_reported_and_the_next_commit_heals(tmp_path: Path, file: str) -> None:
    disk = FullDisk(tmp_path, full=lambda name: name == file)
    harness = Harness(CheckpointStore("unused", storage=disk))
    harness.submit(1)
    ((iteration, error),) = harness.failures()
    assert iteration == 1
    assert isinstance(error, CheckpointError)
    assert "No space left on device" in str(error)
    disk.full = lambda name: False
    harness.submit(2)
    assert harness.done() == [2]
    assert_state(newest(harness.store), 2)
    harness.writer.close()


def test_state_that_is_not_finite_is_reported(harness: Harness) -> None:
    tensors = state(1) | {"policy/weight": torch.tensor([float("nan")])}
    harness.writer.submit(Snapshot(tensors, scopes(tensors)), meta(1))
    ((_, error),) = harness.failures()
    assert isinstance(error, NonFiniteState)


def test_what_does_not_verify_after_the_commit_is_a_failure(tmp_path: Path) -> None:
    class Rotting(CheckpointStore):
        def verify(self, info):  # type: ignore[no-untyped-def]
            path = Path(info.path, STATE_FILE)
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
            super().verify(info)

    harness = Harness(Rotting(str(tmp_path)))
    result = harness.save_now(1)
    assert isinstance(result, SaveFailed)
    assert "state.safetensors: is sha256-" in str(result.error)
    harness.writer.close()


def test_older_ones_are_removed_after_each_commit(tmp_path: Path) -> None:
    harness = Harness(CheckpointStore(str(tmp_path)), keep_last=2)
    for iteration in range(1, 6):
        harness.save_now(iteration)
    assert harness.done() == [1, 2, 3, 4, 5]
    assert [info.iteration for info in harness.store.list()] == [5, 4]
    harness.writer.close()


def test_a_removal_that_fails_is_reported_after_the_success(tmp_path: Path) -> None:
    harness = Harness(CheckpointStore("unused", storage=ReadOnlyRemoval(tmp_path)), keep_last=1)
    harness.save_now(1)
    assert isinstance(harness.save_now(2), SaveDone)
    ((iteration, error),) = harness.failures()
    assert iteration == 2
    assert "cannot remove" in str(error)
    assert harness.done() == [1, 2]
    harness.writer.close()


def test_close_lets_the_one_in_flight_end_and_reports_what_it_drops(harness: Harness) -> None:
    harness.hold_first()
    harness.submit(2)
    harness.writer.close(timeout_s=0.01)
    harness.answer.set()
    harness.writer.close(BOUND_S)
    harness.submit(3)
    assert isinstance(harness.save_now(4), SaveFailed)
    assert harness.done() == [1]
    assert [(iteration, str(error)) for iteration, error in harness.failures()] == [
        (2, "the writer was closed before this save began"),
        (3, "the writer is closed"),
        (4, "the writer is closed"),
    ]
    assert harness.held == []


def test_a_callback_that_raises_is_shown_and_saving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(str(args.exc_value)))
    done: list[int] = []

    def on_done(outcome: SaveDone) -> None:
        done.append(outcome.info.iteration)
        if len(done) == 1:
            raise RuntimeError("the control socket is closed")

    writer = CheckpointWriter(
        CheckpointStore(str(tmp_path)),
        may_commit=lambda generation, iteration: CommitVerdict(True),
        on_done=on_done,
        on_failed=lambda outcome: None,
        keep_last=1,
    )
    for iteration in (1, 2):
        snapshot = Snapshot(state(iteration), scopes(state()))
        result = writer.save_now(snapshot, meta(iteration), timeout_s=BOUND_S)
        assert isinstance(result, SaveDone)
    assert writer.flush(BOUND_S)
    assert done == [1, 2]
    assert shown == ["the control socket is closed"]
    writer.close()


def test_what_does_not_verify_is_removed_as_if_never_made(tmp_path: Path) -> None:
    class Flipping(LocalStorage):
        """Flips a bit of what it is given."""

        def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
            data = bytearray(b"".join(parts))
            data[-1] ^= name == STATE_FILE
            super().create(directory, name, (bytes(data),))

    harness = Harness(CheckpointStore("unused", storage=Flipping(tmp_path)))
    result = harness.save_now(1)
    assert isinstance(result, SaveFailed)
    assert "state.safetensors: is sha256-" in str(result.error)
    assert list(tmp_path.iterdir()) == []
    harness.writer.close()


def test_data_that_was_cut_gets_no_manifest(tmp_path: Path) -> None:
    class Cutting(LocalStorage):
        """Keeps half of what it is given, and says nothing."""

        def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
            data = b"".join(parts)
            super().create(directory, name, (data[: len(data) // 2],))

    harness = Harness(CheckpointStore("unused", storage=Cutting(tmp_path)))
    result = harness.save_now(1)
    assert isinstance(result, SaveFailed)
    assert "has 100 bytes there, of 200 that were written" in str(result.error)
    assert harness.asked == []
    assert list(tmp_path.iterdir()) == []
    harness.writer.close()
