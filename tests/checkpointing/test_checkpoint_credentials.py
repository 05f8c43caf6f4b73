"""Every command that reads a checkpoint takes credentials from a file, and a job's from its own key."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from rallypoint.checkpointing.credentials import DIRECTORY_VARIABLE
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.config import CheckpointSection, DistillSection
from rallypoint.trainer import evaluate, reproduce, warmstart
from rallypoint.trainer.errors import CheckpointMismatch
from rallypoint.trainer.policies import export, play
from tests.checkpointing.samples import allowed, meta, scopes
from tests.checkpointing.test_checkpoint_command import run
from tests.fakes.checkpoints import save
from tests.fakes.command import run_command
from tests.fakes.object_stores import ObjectStore
from tests.fakes.training import config, make_worker
from tests.trainer.test_reproduce import FIRST, SECOND, committed
from tests.trainer.test_reproduce import begins as begins_pointmass

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
    picture = tmp_path / "o.png"
    shown = ("--png", str(picture), "--seconds", "0.1", "--size", "160x120")
    assert run_command(play.COMMAND, kept, *shown, *keys) == 0
    assert picture.stat().st_size > 0


def test_a_journal_is_compared_with_a_checkpoint_that_needs_keys(
    az: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = msgspec.to_builtins(SETTINGS)
    begins = {"event": "generation", "generation": 1, "restore": True, "iteration": 0}
    begins |= {"config": {name: resolved[name] for name in ("job", "env", "ppo")}}
    lines = [json.dumps(begins).encode(), committed(1, ((0,), (0,)))]
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    trained = reproduce.Reproduction(SETTINGS)
    trained.step(*reproduce.read_lineage(lines).iterations)
    url, keys = az.place(), ("--credentials-file", str(az.credentials))
    tensors = trained.state.snapshot.tensors()
    CheckpointStore(url, credentials_file=keys[1]).save(
        tensors, scopes(tensors), meta(1), may_commit=allowed
    )
    trained.close()
    told = (str(tmp_path), "--checkpoint", url, "--json")
    assert run_command(reproduce.COMMAND, *told) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["checkpoint"] is None
    assert "nothing to compare with in numbers: cannot list az://" in said.err
    assert run_command(reproduce.COMMAND, *told, *keys) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"].startswith(url)
    assert report["difference"] == 0


def test_a_checkpoint_of_another_job_is_not_compared_with(
    kept: str, az: ObjectStore, tmp_path: Path
) -> None:
    """Of other networks, say."""
    (tmp_path / "journal.jsonl").write_bytes(begins_pointmass(1) + b"\n" + FIRST + b"\n" + SECOND)
    told = (str(tmp_path), "--checkpoint", kept, "--credentials-file", str(az.credentials))
    with pytest.raises(
        CheckpointMismatch, match=r"is not of the job of this journal: it holds 'counters"
    ):
        run_command(reproduce.COMMAND, *told)


def test_a_teacher_is_read_with_the_keys_of_the_job(az: ObjectStore, kept: str) -> None:
    taught = replace(SETTINGS, distill=DistillSection(teacher=kept))
    with pytest.raises(CheckpointError, match="cannot list az://"):
        make_worker(taught, [0])
    section = replace(JOB, credentials_file=str(az.credentials))
    student = make_worker(replace(taught, checkpoint=section), [0]).live()
    theirs = load_checkpoint(kept, str(az.credentials)).tensors
    held = [name for name in student if name.startswith("teacher/")]
    assert held
    for name in held:
        assert torch.equal(student[name], theirs[name.removeprefix("teacher/")]), name


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
