"""The newest checkpoint over several stores, and what cannot be read of them."""

import errno
from pathlib import Path

import pytest

from rallypoint.checkpointing.manifest import STATE_FILE, CheckpointInfo
from rallypoint.checkpointing.storage import LocalStorage, ReadableFile
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.checkpointing.tiers import newest
from tests.checkpointing.samples import assert_state, commit, commit_of_another_job


class Away(LocalStorage):
    """A storage that cannot be listed, or whose tensors cannot be read, while that is asked for."""

    lists = True
    reads = True

    def list(self, wanted):  # type: ignore[no-untyped-def]
        if not self.lists:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        return super().list(wanted)

    def open(self, directory: str, name: str) -> ReadableFile:
        if not self.reads and name == STATE_FILE:
            raise OSError(errno.EIO, "Slow down")
        return super().open(directory, name)


@pytest.fixture
def remote(tmp_path: Path) -> Away:
    """A remote storage, with iteration 4 of generation 1."""
    storage = Away(tmp_path / "remote")
    commit(CheckpointStore("unused", storage=storage), 4)
    return storage


@pytest.fixture
def stores(tmp_path: Path, remote: Away) -> tuple[CheckpointStore, CheckpointStore]:
    """The remote store, and a local one with iteration 6 and then 2 of a later generation."""
    local = CheckpointStore(str(tmp_path / "local"))
    commit(local, 6)
    commit(local, 2, generation=2)
    return CheckpointStore("unused", storage=remote), local


Stores = tuple[CheckpointStore, CheckpointStore]


def flip(info: CheckpointInfo) -> None:
    path = Path(info.path, STATE_FILE)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def test_the_newest_of_all_stores_by_generation_and_iteration(stores: Stores) -> None:
    remote, local = stores
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 2)
    assert (found.skipped, found.unreadable) == ((), ())
    flip(local.list()[0])
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 6)
    assert len(found.skipped) == 1
    assert found.unreadable == (), "what is damaged does not get better"
    flip(local.list()[1])
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert found.loaded.info == remote.list()[0]


def test_a_store_that_cannot_be_listed_is_said(stores: Stores, remote: Away) -> None:
    remote.lists = False
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 2)
    assert found.unreadable == found.skipped
    assert "Connection timed out" in found.unreadable[0]


def test_a_newer_one_that_cannot_be_read_now_is_said(stores: Stores, remote: Away) -> None:
    commit(stores[0], 9, generation=3)
    remote.reads = False
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 2)
    assert len(found.unreadable) == 1
    assert "Slow down" in found.unreadable[0]
    remote.reads = True
    found = newest(stores, "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 9)
    assert found.unreadable == ()


def test_nothing_anywhere_is_nothing(tmp_path: Path) -> None:
    assert newest([CheckpointStore(str(tmp_path))], "walk").loaded is None


def test_what_another_job_left_there_is_not_restored(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    commit(CheckpointStore(str(root)), 4)
    stranger = commit_of_another_job(root, tmp_path / "crawl")
    found = newest([CheckpointStore(str(root))], "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 4)
    assert found.skipped == (f"{stranger.path}: is of job 'crawl', not of 'walk'",)
    assert found.unreadable == ()
    commit(CheckpointStore(str(root)), 5)
    found = newest([CheckpointStore(str(root))], "walk")
    assert found.loaded is not None
    assert_state(found.loaded, 5)
