"""A writer that dies before each of its storage operations, and writers that race, on each storage."""

import os
import signal
from collections.abc import Callable

import pytest

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.storage import Storage
from rallypoint.checkpointing.store import CheckpointStore
from tests.checkpointing.samples import assert_state, commit, newest
from tests.checkpointing.test_checkpoint_crash import race, run_in_child
from tests.fakes.dying import DyingStorage, Killed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Open = Callable[[], Storage]


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_here() -> None:
    raise Killed


def commit_and_prune(storage: Storage, iteration: int, generation: int = 1) -> None:
    store = CheckpointStore("unused", storage=storage)
    store.prune(1, verified=commit(store, iteration, generation))


def dies_within(open_place: Open, survives: int, iteration: int) -> bool:
    """Whether a writer that may do so many operations dies before it has committed and pruned: by
    SIGKILL, but where its storage would die with it."""
    if open_place().root.startswith("memory:"):
        try:
            commit_and_prune(DyingStorage(open_place(), survives, die_here), iteration)
        except Killed:
            return True
        return False
    code = run_in_child(
        lambda: commit_and_prune(DyingStorage(open_place(), survives, kill_this_process), iteration)
    )
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_before_every_single_storage_operation(open_place: Open) -> None:
    """One place for all of them, so that leftovers gather until somebody survives."""
    store = CheckpointStore("unused", storage=open_place())
    commit_and_prune(open_place(), 1)
    newest_iteration, deaths, committed_at_death = 1, 0, 0
    while dies_within(open_place, deaths, deaths + 2):
        loaded, skipped = store.restore_newest()
        assert loaded is not None
        assert skipped == (), f"killed after {deaths} operations: {skipped}"
        found = loaded.manifest.iteration
        assert found in (newest_iteration, deaths + 2)
        assert_state(loaded, found)
        committed_at_death += found != newest_iteration
        newest_iteration, deaths = found, deaths + 1
        assert deaths < 60, "the writer does not end"
    assert deaths >= 10
    assert committed_at_death >= 2, "killed after its manifest, while it pruned"
    assert deaths - committed_at_death >= 5
    assert_state(newest(store), deaths + 2)
    assert len(open_place().list(lambda directory: True)) == 1, "all leftovers are collected"


def test_two_writers_with_different_fences_race(open_place: Open) -> None:
    """The later generation is at an earlier iteration, as after a restore. Whatever the order in which
    they end, it is what a restart takes, and what was committed before stays readable. Every tenth time
    both prune too, so that one may remove what the other still writes."""
    old, new = (CheckpointStore("unused", storage=open_place()) for _ in range(2))
    reader = CheckpointStore("unused", storage=open_place())
    refusals: list[str] = []

    def write(store: CheckpointStore, iteration: int, generation: int, *, prunes: bool) -> None:
        try:
            info = commit(store, iteration, generation)
            if prunes:
                store.prune(1, verified=info)
        except CheckpointError as error:
            refusals.append(str(error))

    for turn in range(200):
        fence, prunes = 2 * turn + 1, turn % 10 == 9
        race(
            lambda: write(old, 500, fence, prunes=prunes),  # noqa: B023
            lambda: write(new, 7, fence + 1, prunes=prunes),  # noqa: B023
        )
        orders = [info.order for info in reader.list()]
        assert orders[:1] == [(fence + 1, 7)]
        if prunes:
            loaded, skipped = reader.restore_newest()
            assert loaded is not None
            assert skipped == ()
            assert loaded.info.order == (fence + 1, 7)
        else:
            assert (refusals, orders[1]) == ([], (fence, 500))
        while prunes and refusals:
            refusal = refusals.pop()
            assert "removed while" in refusal or "missing" in refusal
