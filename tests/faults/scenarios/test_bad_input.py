"""Bad input on a directory that holds a real job: refused in words with nothing overwritten, or
recovered from where that is promised."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injectors.job import OPTIONS, WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]

OWN = {"supervisor.lock", "state.json"}
"""Files that name the supervisor itself, also one that then refuses to start."""


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``rallypoint run`` with one worker, to its end."""
    program = [sys.executable, "-m", "rallypoint.daemon.cli", "run", "--dir", str(directory)]
    return subprocess.run(
        [*program, *OPTIONS, "--workers", "1", "--set", "checkpoint.every_iterations=3", *options],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that has finished at iteration 6, with checkpoints of iterations 3 and 6."""
    directory = tmp_path_factory.mktemp("bad-input") / "run"
    done = run(directory, "--iterations", "6")
    assert done.returncode == 0, done.stderr
    assert {3, 6} <= set(checkpoints(directory))
    return directory


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def checkpoints(directory: Path) -> dict[int, Path]:
    found = (directory / "checkpoints").glob("*/manifest.json")
    return {json.loads(path.read_text())["iteration"]: path.parent for path in found}


def tree(directory: Path) -> dict[str, bytes]:
    """Every file and its content, save what names the supervisor."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in OWN)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def persisted(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / "state.json").read_text())
    del state["supervisor_incarnation"]
    return state


def journal(directory: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def logged(done: subprocess.CompletedProcess[str], event: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--set", "env.num_env=16"], ["'env.num_env'", "'env.num_envs'"]),
        (["--set", "env.num_envs=20"], ["env.num_envs = 20", "16"]),
        (
            ["--set", "env.budget=global", "--set", "env.num_envs=16", "--workers", "3"],
            ["env.num_envs = 16", "3"],
        ),
        (["--fresh"], ["--fresh", "leave out --fresh"]),
        (["--job", "another"], ["'another'", "--job default"]),
        (["--set", "ppo.gamma=0.5"], ["ppo.gamma", "0.99", "0.5", "--dir"]),
        (["--set", "checkpoint.url=ftp://host/x"], ["checkpoint.url", "ftp://host/x"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "-" in value[0] else "",
)
def test_a_start_that_is_refused_overwrites_nothing(
    job: Path, options: list[str], parts: list[str]
) -> None:
    before, state = tree(job), persisted(job)
    done = run(job, "--iterations", "9", *options)
    assert done.returncode == 2
    assert [part for part in parts if part not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert tree(job) == before
    assert persisted(job) == state


def test_a_taken_port_stops_a_resume_before_it_begins(job: Path) -> None:
    before, state = tree(job), persisted(job)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(job, "--iterations", "9", "--metrics-port", port)
    assert done.returncode == 2
    assert port in done.stderr
    assert "--metrics-port" in done.stderr
    assert tree(job) == before
    assert persisted(job) == state


@pytest.mark.parametrize("name", ["--dir", "checkpoint.url"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    """A file is in the way: that stops root as well."""
    (tmp_path / "file").write_text("precious")
    place = tmp_path / "file" / "below"
    options = {
        "--dir": ["--dir", str(place)],
        "checkpoint.url": ["--set", f"checkpoint.url={place}"],
    }[name]
    done = run(tmp_path / "run", "--iterations", "3", *options)
    assert done.returncode == 2
    assert str(place) in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "precious"
    assert not (tmp_path / "run" / "logs").exists(), "no worker was started"


def damage(checkpoint: Path) -> None:
    """Flip one bit in the middle of the state."""
    (state,) = checkpoint.glob("*.safetensors")
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)


def test_numeric_36_a_corrupt_newest_checkpoint_gives_way_to_the_one_before(job: Path) -> None:
    before, broken = tree(job), checkpoints(job)[6]
    damage(broken)
    done = run(job, "--iterations", "8")
    assert done.returncode == 0, done.stderr
    restored = journal(job, "generation")[-1]
    assert (restored["restore"], restored["iteration"]) == (True, 3)
    assert [line["iteration"] for line in journal(job, "iteration")] == [*range(1, 7), *range(4, 9)]
    skipped = logged(done, "checkpoint_skipped")
    assert skipped[0]["level"] == "error"
    assert str(broken) in skipped[0]["reason"]
    old = before["journal.jsonl"]
    assert (job / "journal.jsonl").read_bytes()[: len(old)] == old, "appended to, not rewritten"


def test_without_any_sound_checkpoint_the_job_does_not_start_from_scratch(job: Path) -> None:
    for checkpoint in checkpoints(job).values():
        damage(checkpoint)
    before = tree(job)
    done = run(job, "--iterations", "8")
    assert done.returncode == 1
    assert "not starting from scratch" in done.stderr
    assert "iteration 6" in done.stderr
    after = tree(job)
    assert {name: after[name] for name in before if name.startswith("checkpoints/")} == {
        name: data for name, data in before.items() if name.startswith("checkpoints/")
    }
    assert after["journal.jsonl"] == before["journal.jsonl"]


def test_a_second_supervisor_leaves_the_first_alone(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "rallypoint.daemon.cli", "run", "--dir", str(tmp_path / "run")]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(
            [*program, *OPTIONS, "--workers", "1"], stdout=log, stderr=log, env={**os.environ}
        )
    try:
        lock = tmp_path / "run" / "supervisor.lock"
        second = None
        while second is None:
            assert first.poll() is None, (tmp_path / "log").read_text()
            if lock.exists() and lock.read_text() == f"{first.pid}\n":
                second = run(tmp_path / "run")
        assert second.returncode == 2
        assert f"another supervisor (pid {first.pid})" in second.stderr
        assert "rallypoint stop" in second.stderr
        assert lock.read_text() == f"{first.pid}\n"
        assert first.poll() is None
        first.terminate()
        assert first.wait(WAIT_S) == 0
    finally:
        first.kill()
        first.wait(WAIT_S)


def test_a_teacher_of_another_task_is_refused_before_anything_starts(
    job: Path, tmp_path: Path
) -> None:
    other = ["--set", "env.task=cartpole", "--set", f"distill.teacher={job}"]
    done = run(tmp_path / "student", *other)
    assert done.returncode == 2
    assert "'pointmass'" in done.stderr
    assert "env.task = 'cartpole'" in done.stderr
    assert not (tmp_path / "student" / "logs").exists(), "no worker was started"


def test_workers_that_cannot_be_built_fail_the_job_with_the_reason(
    job: Path, tmp_path: Path
) -> None:
    """As in their warm-up: not started again and again until their slots are quarantined."""
    for checkpoint in checkpoints(job).values():
        damage(checkpoint)
    done = run(tmp_path / "student", "--set", f"distill.teacher={job}")
    assert done.returncode == 1
    (failed,) = logged(done, "supervisor_ended")
    assert "program error" in failed["reason"]
    assert "nothing here verifies" in failed["reason"]
