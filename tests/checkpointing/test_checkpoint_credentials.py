"""Every command that reads a checkpoint takes credentials from a file, and a job's from its own key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.checkpointing.credentials import DIRECTORY_VARIABLE
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.daemon.shared.config import CheckpointSection
from rallypoint.trainer import evaluate, warmstart
from rallypoint.trainer.policies import export
from tests.checkpointing.test_checkpoint_command import run
from tests.fakes.checkpoints import save
from tests.fakes.command import run_command
from tests.fakes.object_stores import ObjectStore
from tests.fakes.training import config, make_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = config(task="cartpole", dtype="float32")
JOB = CheckpointSection(url="az://checkpoints/job", credentials_file="keys")


@pytest.fixture
def kept(az: ObjectStore, tmp_path: Path) -> str:
    """URL of two checkpoints of a policy that were copied there; nothing but a file says how to get in."""
    worker = make_worker(SETTINGS, [0])
    for iteration in (1, 2):
        save(tmp_path / "local", worker, SETTINGS, iteration)
    url = az.place()
    there = ("--target-credentials-file", str(az.credentials))
    assert run("copy", str(tmp_path / "local"), url, "--all", *there) == 0
    return url


def test_checkpoints_takes_a_file(
    az: ObjectStore, kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--credentials-file", str(az.credentials), "--json")
    capsys.readouterr()
    for action in ("list", "verify"):
        assert run(action, kept, *keys) == 0
        assert [row["iteration"] for row in json.loads(capsys.readouterr().out)] == [2, 1]
    assert run("inspect", kept, *keys) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["iteration"] == 2
    assert run("prune", kept, "--keep-last", "1", "--yes", *keys) == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 1
    other = az.place()
    assert run("copy", kept, other, *keys) == 0, "the same keys for the same backend"
    assert run("copy", other, str(tmp_path / "back"), *keys) == 0
    assert len(az.files(other)) == 2


def test_commands_that_run_a_policy_take_a_systemd_credential(
    az: ObjectStore,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CheckpointError, match="cannot list az://"):
        run_command(evaluate.COMMAND, kept, "--episodes", "1")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(az.credentials.parent))
    keys = ("--credentials-file", az.credentials.name, "--json")
    assert run_command(evaluate.COMMAND, kept, "--episodes", "2", *keys) == 0
    output = tmp_path / "policy.onnx"
    assert run_command(export.COMMAND, kept, "--output", str(output), *keys) == 0
    assert output.stat().st_size > 0


def test_the_key_may_come_from_the_environment(
    az: ObjectStore, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_CHECKPOINT__CREDENTIALS_FILE", str(az.credentials))
    assert run("verify", kept) == 0


def test_a_warm_start_uses_the_keys_of_its_job(az: ObjectStore, kept: str) -> None:
    section = replace(JOB, credentials_file=str(az.credentials))
    job, worker = replace(SETTINGS, checkpoint=section), make_worker(SETTINGS, [0])
    loaded = warmstart.load(kept, job, worker.live(), lambda text: None)
    assert loaded.info.iteration == 2


def test_keys_are_for_their_own_backend() -> None:
    assert JOB.credentials_for("az://checkpoints/another") == "keys"
    assert JOB.credentials_for("s3://bucket/x") is None
    assert JOB.credentials_for("/a/directory") is None
