"""``rallypoint checkpoints``, and loading from whatever a user points at."""

import argparse
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from rallypoint.checkpointing.command import COMMAND
from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint, UnsupportedUrl
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE, CheckpointInfo
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.checkpointing.store import CheckpointStore
from tests.checkpointing.samples import assert_state, commit


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args(arguments))


@pytest.fixture
def infos(tmp_path: Path) -> list[CheckpointInfo]:
    """Two checkpoints of a run in ``tmp_path``, newest first."""
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    return [commit(store, 20, 2), commit(store, 10, 1)]


def cut(info: CheckpointInfo) -> None:
    path = Path(info.path, STATE_FILE)
    path.write_bytes(path.read_bytes()[:-1])


def test_list_as_json(
    infos: list[CheckpointInfo], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(infos[0])
    assert run("list", str(tmp_path / "checkpoints"), "--json") == 0
    newer, older = json.loads(capsys.readouterr().out)
    assert newer["error"].endswith("has 199 bytes, its manifest says 200")
    del newer["error"]
    assert newer == {
        "iteration": 20,
        "generation": 2,
        "path": infos[0].path,
        "verified": False,
        "size_bytes": infos[0].size_bytes - 1,
    }
    assert older == {
        "iteration": 10,
        "generation": 1,
        "path": infos[1].path,
        "verified": True,
        "size_bytes": infos[1].size_bytes,
        "error": None,
    }


def test_verify_exits_non_zero_on_damage(
    infos: list[CheckpointInfo], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", str(tmp_path)) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    cut(infos[1])
    assert run("verify", str(tmp_path), "--json") == 1
    assert [row["verified"] for row in json.loads(capsys.readouterr().out)] == [True, False]
    assert run("verify", str(tmp_path)) == 1
    text = capsys.readouterr().out
    assert "DAMAGED" in text
    assert "has 199 bytes" in text
    assert run("verify", infos[0].path) == 0


def test_nothing_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("list", "prune"):
        assert run(action, str(tmp_path), "--json") == 0, "a run may not have one yet"
        output = capsys.readouterr()
        assert output.out == ("[]\n" if action == "list" else "")
        assert output.err.startswith(f"{tmp_path}: no committed checkpoint; give a checkpoint (")
        assert output.err.count("\n") == 1
    for action in ("list", "prune", "verify", "inspect"):
        with pytest.raises(CheckpointError, match="nowhere: no committed checkpoint; give a"):
            run(action, str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: no committed checkpoint; give a"):
        run("verify", str(tmp_path))


def test_a_url_of_another_kind_is_a_configuration_error() -> None:
    with pytest.raises(UnsupportedUrl):
        run("list", "ftp://host/checkpoints")


@pytest.mark.parametrize("below", ["", "/", "checkpoints", "checkpoints/"])
def test_a_run_or_a_directory_of_checkpoints_means_the_newest(
    infos: list[CheckpointInfo], tmp_path: Path, below: str
) -> None:
    assert_state(load_checkpoint(f"{tmp_path}/{below}"), 20)
    assert load_checkpoint(f"file://{tmp_path}/{below}").info == infos[0]


def test_the_newest_that_verifies_and_what_was_skipped(
    infos: list[CheckpointInfo], tmp_path: Path
) -> None:
    cut(infos[0])
    loaded = load_checkpoint(str(tmp_path))
    assert_state(loaded, 10)
    assert len(loaded.skipped) == 1
    assert infos[0].path in loaded.skipped[0]


def test_one_checkpoint_means_that_one(
    infos: list[CheckpointInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_checkpoint(infos[1].path).info == infos[1]
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert_state(load_checkpoint(infos[1].directory), 10)
    monkeypatch.chdir(infos[1].path)
    assert_state(load_checkpoint("."), 10)


def test_a_copy_under_another_name_means_that_copy(
    infos: list[CheckpointInfo], tmp_path: Path
) -> None:
    shutil.copytree(infos[1].path, tmp_path / "best")
    loaded = load_checkpoint(str(tmp_path / "best"))
    assert_state(loaded, 10)
    assert loaded.info.path == str(tmp_path / "best")
    assert run("verify", str(tmp_path / "best")) == 0
    cut(loaded.info)
    assert run("verify", str(tmp_path / "best")) == 1
    (tmp_path / "best" / MANIFEST_FILE).write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"best/manifest\.json: not a manifest"):
        run("verify", str(tmp_path / "best"))


def test_no_checkpoint_says_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no committed checkpoint; give a"):
        load_checkpoint(str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    """Standard error of somebody who looks on."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("action", "shown"), [("list", "verifying"), ("prune", "looking")])
def test_long_work_shows_a_bar_on_a_terminal_apart_from_the_result(
    infos: list[CheckpointInfo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
    shown: str,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert run(action, str(tmp_path), "--json") == 0
    said = capsys.readouterr()
    assert said.err == "", "nobody looks on"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(action, str(tmp_path), "--json") == 0
    assert shown in terminal.getvalue()
    assert json.loads(capsys.readouterr().out) == json.loads(said.out)
