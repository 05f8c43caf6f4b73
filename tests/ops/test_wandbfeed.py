"""The feed of Weights & Biases, with a stand-in for its client library."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.shared.config import Config
from rallypoint.ops.wandbfeed import Feed
from tests.fakes import supervise_wandb
from tests.fakes.facts import A, committed, formed, plan
from tests.faults.injectors.job import FaultJob


class Told:
    """A run that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, data: Any, *, step: int) -> None:
        assert data["world_size"] == 1
        self.steps.append(step)

    def finish(self) -> None: ...


def test_each_iteration_is_fed_once_by_whoever_feeds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.generation(plan(1, A, restore=True), formed(A, 1), Config())
    told = Told()

    def commit(*iterations: int, generation: int = 1) -> None:
        for i in iterations:
            hashed = f"{generation}-{i}"
            journal.commit(committed(A, i, {A: 60}, generation=generation, state_hash=hashed))

    def feed() -> Feed:
        return Feed(told, journal.path, "local", tmp_path / "fed.json")

    first = feed()
    commit(1, 2)
    first.follow()
    commit(3)
    first.follow()
    commit(4)
    second = feed()  # the first was killed
    second.follow()
    journal.generation(plan(2, A, restore=True), formed(A, 2, 2), Config())
    commit(3, 4, 5, generation=2)
    second.follow()
    feed().follow()
    Feed(told, journal.path, "another", tmp_path / "other.json").follow()
    journal.close()
    assert told.steps == [1, 2, 3, 4, 5]


def test_without_the_extra_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    assert cli.main(["run", "--dir", str(directory), "--set", "curves.wandb=true"]) == 2
    assert "rallypoint[wandb]" in capsys.readouterr().err
    assert {path.name for path in directory.iterdir()} <= {"supervisor.lock", "checkpoints"}


@pytest.mark.slow
@pytest.mark.faults
def test_a_job_is_fed_over_the_death_of_its_supervisor(tmp_path: Path) -> None:
    program = (str(supervise_wandb.__file__),)
    options = (
        *("--workers", "1", "--set", "curves.wandb=true", "--set", "curves.wandb_mode=offline"),
        *("--set", "membership.orphan_grace_s=60.0"),
    )
    job = FaultJob(tmp_path / "run", *options, command=program)
    again = None
    try:
        job.settle(1)
        job.end(signal.SIGKILL)
        again = FaultJob(tmp_path / "run", *options, command=program)
        again.settle(1)
        assert again.end() == 0
        text = (job.rundir.wandb / "told.jsonl").read_text()
        told = [json.loads(line) for line in text.splitlines()]
        steps = [line["step"] for line in told if line["event"] == "log"]
        last = [line["iteration"] for line in again.journal() if line["event"] == "iteration"][-1]
        assert steps == list(range(1, last + 1))
        begun = [line for line in told if line["event"] == "init"]
        uid = json.loads(job.rundir.state.read_text())["job"]["uid"]
        assert {line["id"] for line in begun} == {uid}
        assert [line["event"] for line in told if line["event"] != "log"] == ["init", "finish"] * 2
        assert len({line["pid"] for line in told}) == 2
        assert again.processes_left() == []
    finally:
        for one in (job, again):
            if one is not None:
                one.end_all()
