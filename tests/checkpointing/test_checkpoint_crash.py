"""Writers that die or race: after a SIGKILL at any moment a restart finds a whole checkpoint."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.storage import LocalStorage
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.failpoints import Failpoints, parse
from tests.checkpointing.samples import allowed, assert_state, commit, meta, newest, scopes, state

FORK = multiprocessing.get_context("fork")
BOUND_S = 120.0
"""Of every wait: far above what any takes, on a busy machine and over HTTP too."""


def run_in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; its exit code (negative: a signal)."""
    child = FORK.Process(target=work)
    child.start()
    child.join(BOUND_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        pytest.fail(f"the writer did not end within {BOUND_S} s")
    return child.exitcode


def die_at_operation(number: int, root: Path) -> None:
    """SIGKILL this process right before its ``number``-th file operation below ``root``."""
    left = number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        known = ("open", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.scandir")
        if event in known and str(arguments[0]).startswith(str(root)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def commit_and_prune(store: CheckpointStore, iteration: int) -> None:
    commit(store, iteration)
    store.prune(1)


@pytest.mark.slow
def test_killed_before_every_single_file_operation(tmp_path: Path) -> None:
    survived = kills = 0
    for number in range(1, 100):
        root = tmp_path / f"{number}"
        store = CheckpointStore(str(root))
        commit_and_prune(store, 1)

        def work(number: int = number, root: Path = root, store: CheckpointStore = store) -> None:
            die_at_operation(number, root)
            commit_and_prune(store, 2)

        code = run_in_child(work)
        loaded, skipped = store.restore_newest()
        assert loaded is not None
        assert skipped == (), f"killed before operation {number}: {skipped}"
        assert_state(loaded, loaded.info.iteration)
        commit_and_prune(store, 3)
        assert_state(newest(store), 3)
        assert len(list(root.iterdir())) == 1, "the leftovers of the killed writer are collected"
        if code == 0:
            survived = number
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert survived, "the writer ended before it reached the last operation"
    assert kills >= 12


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint_save", "checkpoint_manifest"])
def test_killed_at_a_failpoint(tmp_path: Path, point: str) -> None:
    root, log = tmp_path / "checkpoints", tmp_path / "fired"
    store = CheckpointStore(str(root))
    commit(store, 1)

    def work() -> None:
        points = Failpoints(parse(f"{point}=kill"), log)
        tensors = state(2)
        store.save(tensors, scopes(tensors), meta(2), may_commit=allowed, hit=points.hit)

    assert run_in_child(work) == -signal.SIGKILL
    assert log.read_text().startswith(f"{point}=kill pid=")
    assert len(list(root.iterdir())) == 2, "the killed writer left something behind"
    assert_state(newest(store), 1)
    commit_and_prune(store, 3)
    assert [path.name for path in root.iterdir()] == [store.list()[0].directory]


@pytest.mark.slow
def test_stopped_between_question_and_manifest_and_continued_later(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))

    def work() -> None:
        points = Failpoints(parse("checkpoint_manifest=stop"))
        tensors = state(9)
        store.save(tensors, scopes(tensors), meta(9), may_commit=allowed, hit=points.hit)

    child = FORK.Process(target=work)
    child.start()
    assert child.pid is not None
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    commit(store, 3, generation=2)
    os.kill(child.pid, signal.SIGCONT)
    child.join(BOUND_S)
    assert child.exitcode == 0
    assert [info.order for info in store.list()] == [(2, 3), (1, 9)]
    assert_state(newest(store), 3)


@pytest.mark.slow
def test_numeric_36_two_writers_of_one_name_race_and_one_wins(tmp_path: Path) -> None:
    for attempt in range(100):
        name = f"{attempt:016x}"
        barrier = threading.Barrier(2)
        outcomes: list[str] = []

        def work(
            value: float,
            attempt: int = attempt,
            name: str = name,
            barrier: threading.Barrier = barrier,
            outcomes: list[str] = outcomes,
        ) -> None:
            store = CheckpointStore(str(tmp_path), new_attempt=lambda: name)
            tensors = state(value)
            barrier.wait(BOUND_S)
            try:
                store.save(tensors, scopes(tensors), meta(attempt), may_commit=allowed)
                outcomes.append(f"won {value}")
            except CheckpointError as error:
                outcomes.append(str(error).partition("; ")[2])

        race(lambda: work(1.0), lambda: work(2.0))
        won = [outcome for outcome in outcomes if outcome.startswith("won")]
        assert len(won) == 1
        assert "nothing was overwritten" in outcomes
        loaded = newest(CheckpointStore(str(tmp_path)))
        assert loaded.manifest.iteration == attempt
        assert won == [f"won {loaded.tensors['policy/weight'][0, 0].item()}"]


@pytest.mark.slow
def test_two_creators_of_one_file_race_and_one_wins_whole(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.claim("d")
    contents = {byte: bytes([byte]) * 100_000 for byte in (1, 2)}
    for attempt in range(100):
        lost: list[int] = []
        barrier = threading.Barrier(2)

        def work(
            byte: int,
            name: str = f"f{attempt}",
            barrier: threading.Barrier = barrier,
            lost: list[int] = lost,
        ) -> None:
            barrier.wait(BOUND_S)
            try:
                storage.create("d", name, (contents[byte],))
            except FileExistsError:
                lost.append(byte)

        race(lambda: work(1), lambda: work(2))
        assert len(lost) == 1
        assert (tmp_path / "d" / f"f{attempt}").read_bytes() == contents[3 - lost[0]]
    assert len(list((tmp_path / "d").iterdir())) == 100, "no temporary file is left"


@pytest.mark.slow
def test_numeric_36_two_writers_of_different_generations_race(tmp_path: Path) -> None:
    """Commits and prunes of an old and a new generation, interleaved: the newer one always wins."""
    refusals: list[str] = []
    for turn in range(60):
        old, new = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
        generation = 2 * turn + 1

        def write_old(store: CheckpointStore = old, generation: int = generation) -> None:
            try:
                commit(store, 500, generation)
                store.prune(1)
            except CheckpointError as error:
                refusals.append(str(error))

        def write_new(store: CheckpointStore = new, generation: int = generation) -> None:
            commit(store, 7, generation + 1)
            store.prune(1)

        race(write_old, write_new)
        assert_state(newest(new), 7)
        assert newest(new).info.generation == generation + 1
    assert all("overtaken" in refusal for refusal in refusals), refusals


def race(*works: Callable[[], None]) -> None:
    """Run all at once, in threads; raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed over to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
