"""``checkpoints copy`` and ``inspect``: between stores, broken off at any point, and what is in one."""

import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE, CheckpointInfo
from rallypoint.checkpointing.storage import Buffer, LocalStorage
from rallypoint.checkpointing.store import CheckpointStore
from tests.checkpointing.samples import (
    allowed,
    assert_state,
    commit,
    meta,
    newest,
    scopes,
    state,
)
from tests.checkpointing.test_checkpoint_command import cut, run


@pytest.fixture
def infos(tmp_path: Path) -> list[CheckpointInfo]:
    """Three checkpoints in ``a``, newest first."""
    store = CheckpointStore(str(tmp_path / "a"))
    return [commit(store, iteration) for iteration in (30, 20, 10)]


def test_the_newest_that_verifies_is_copied(
    infos: list[CheckpointInfo], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(infos[0])
    assert run("copy", str(tmp_path / "a"), str(tmp_path / "b")) == 1
    said = capsys.readouterr()
    assert "not copied" in said.err
    assert infos[0].path in said.err
    assert infos[1].directory in said.out
    assert_state(newest(CheckpointStore(str(tmp_path / "b"))), 20)
    assert run("copy", infos[2].path, str(tmp_path / "b")) == 0
    assert [i.iteration for i in CheckpointStore(str(tmp_path / "b")).list()] == [20, 10]


def test_all_to_another_kind_of_store_and_back(infos: list[CheckpointInfo], tmp_path: Path) -> None:
    assert run("copy", str(tmp_path / "a"), "memory://copies", "--all", "--json") == 0
    assert run("copy", "memory://copies", str(tmp_path / "b"), "--all") == 0
    for info in infos:
        for name in (MANIFEST_FILE, STATE_FILE):
            copied = tmp_path / "b" / info.directory / name
            assert copied.read_bytes() == Path(info.path, name).read_bytes()
    assert run("copy", str(tmp_path / "a"), str(tmp_path / "b"), "--all") == 0, (
        "again: all is there"
    )


class BreaksOff(LocalStorage):
    """A target that is lost before it creates a file of this name."""

    def __init__(self, root: Path, at: str) -> None:
        super().__init__(root)
        self.at = at

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        if name == self.at:
            raise OSError(errno.EIO, "Input/output error")
        super().create(directory, name, parts)


@pytest.mark.parametrize("at", [STATE_FILE, MANIFEST_FILE])
def test_a_copy_that_was_broken_off_is_not_there_and_can_be_ended(
    at: str, infos: list[CheckpointInfo], tmp_path: Path
) -> None:
    source = CheckpointStore(str(tmp_path / "a"))
    broken = CheckpointStore("unused", storage=BreaksOff(tmp_path / "b", at))
    with pytest.raises(CheckpointError, match=r"cannot copy .* to .*/b/.*: .*Input/output error"):
        source.copy(infos[0], broken)
    target = CheckpointStore(str(tmp_path / "b"))
    assert target.list() == []
    seen: list[int] = []
    source.copy(infos[0], target, seen.append)
    assert_state(newest(target), 30)
    assert sum(seen) > 0


def test_nothing_is_overwritten(infos: list[CheckpointInfo], tmp_path: Path) -> None:
    source, target = CheckpointStore(str(tmp_path / "a")), CheckpointStore(str(tmp_path / "b"))
    folder = tmp_path / "b" / infos[0].directory
    folder.mkdir(parents=True)
    (folder / STATE_FILE).write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"is there and differs .*nothing was overwritten"):
        source.copy(infos[0], target)
    assert (folder / STATE_FILE).read_bytes() == b"mine"
    assert target.list() == []


def test_two_jobs_do_not_share_a_directory(infos: list[CheckpointInfo], tmp_path: Path) -> None:
    other = CheckpointStore(str(tmp_path / "b"))
    tensors = state(1)
    other.save(tensors, scopes(tensors), meta(1, job="run"), may_commit=allowed)
    with pytest.raises(CheckpointError, match="holds checkpoints of job 'run', not of 'walk'"):
        CheckpointStore(str(tmp_path / "a")).copy(infos[0], other)


def test_a_damaged_one_is_not_copied(infos: list[CheckpointInfo], tmp_path: Path) -> None:
    cut(infos[0])
    with pytest.raises(DamagedCheckpoint):
        CheckpointStore(str(tmp_path / "a")).copy(infos[0], CheckpointStore(str(tmp_path / "b")))
    assert not (tmp_path / "b").exists()


def test_inspect_shows_what_is_in_one(
    infos: list[CheckpointInfo], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", str(tmp_path / "a")) == 0
    said = capsys.readouterr().out
    for part in (
        f"{infos[0].path} (verified)",
        "job            walk (uid-1)",
        "env steps      3,000",
        "return_mean = 1.5",
        "policy/weight     replicated  F32   [3, 4]",
        "statistics/count  replicated  I64   []",
    ):
        assert part in said, part
    assert run("inspect", infos[1].path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verified"] is True
    assert document["manifest"]["iteration"] == 20
    shutil.copytree(infos[2].path, tmp_path / "best")
    cut(infos[0])
    assert run("inspect", str(tmp_path / "best")) == 0
    assert run("inspect", str(tmp_path / "a")) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/best (verified)" in said
    assert "DAMAGED" in said
    with pytest.raises(CheckpointError, match="no committed checkpoint; give"):
        run("inspect", str(tmp_path / "nowhere"))


def test_a_copy_to_a_run_goes_to_its_checkpoints(
    infos: list[CheckpointInfo], tmp_path: Path
) -> None:
    """Beside them it would hide them."""
    run_directory = tmp_path / "run"
    commit(CheckpointStore(str(run_directory / "checkpoints")), 1)
    (run_directory / "state.json").write_text("{}")
    assert run("copy", infos[2].path, str(run_directory)) == 0
    held = CheckpointStore(str(run_directory / "checkpoints")).list()
    assert [info.iteration for info in held] == [10, 1]
    assert not list(run_directory.glob("iteration-*"))
