"""Signals and drills as preemption notices: a real supervisor, workers without torch."""

import json
import signal
import time
from pathlib import Path

import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.executors import proctable
from tests.fakes.supervised import Status, Supervised, pids, supervised

pytestmark = [pytest.mark.slow]


def sources(*names: str) -> tuple[str, ...]:
    return ("--set", f"preemption.sources={json.dumps(names)}")


def last_iteration(run: Supervised) -> int:
    found: int = [line["iteration"] for line in run.journal() if line["event"] == "iteration"][-1]
    return found


def hangs(status: Status) -> bool:
    """The worker of slot 1 is stopped in the middle of an iteration."""
    pid = pids(status)[1]
    entry = None if pid is None else proctable.read(pid)
    return entry is not None and entry.state == "T"


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("slurm", signal.SIGUSR1),
        ("slurm", signal.SIGTERM),
        ("kubernetes", signal.SIGTERM),
        ("signal", signal.SIGUSR1),
    ],
)
def test_a_signal_is_a_notice_where_the_configuration_says_so(
    tmp_path: Path, source: str, number: signal.Signals
) -> None:
    with supervised(tmp_path / "run", *sources(source)) as run:
        run.wait_for_training(2)
        run.process.send_signal(signal.SIGCONT)  # Slurm sends it before SIGTERM
        assert run.end(number) == 75
        (ordered,) = run.logged("checkpoint_ordered")
        assert number.name in ordered["reason"]
        committed = [line["iteration"] for line in run.logged("checkpoint_committed")]
        assert committed[-1] == last_iteration(run)
        assert run.logged("supervisor_ended")[0]["reason"].endswith("30 s left")
        assert run.workers() == []


def test_a_repeated_signal_kills_nothing(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", *sources("slurm")) as run:
        run.wait_for_training(2)
        run.process.send_signal(signal.SIGUSR1)
        assert run.end(signal.SIGTERM) == 75
        assert not run.logged("killed_at_once")
        assert not run.logged("worker_killed")


def test_with_cloud_sources_only_sigterm_is_a_drain_with_0(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", *sources()) as run:
        run.wait_for_training(2)
        assert run.end(signal.SIGTERM) == 0
        assert not run.logged("notice_received")


def test_an_iteration_that_does_not_end_is_left_by_force_inside_the_deadline(
    tmp_path: Path,
) -> None:
    options = (
        *sources("kubernetes"),
        "--set",
        "node.stop_grace_s=3",
        "--set",
        "membership.hang_s=20",
    )
    with supervised(tmp_path / "run", *options, worker={"faults": [["hang", 1, 1, 3]]}) as run:
        run.wait_for(hangs)
        sent_s = time.monotonic()
        assert run.end(signal.SIGTERM) == 75
        assert time.monotonic() - sent_s < 3.0
        killed = run.logged("worker_killed")
        assert [line["worker"] for line in killed] == ["local/1#1"]
        assert "deadline" in killed[0]["reason"]
        assert run.workers() == []


def test_a_drill_says_whether_the_node_left_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    with supervised(directory) as run:
        run.wait_for_training(2)
        assert main(["simulate-notice", "--dir", str(directory), "--in-s", "20", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["exited"], answer["passed"]) == (75, True)
        assert 0 < answer["seconds"] < 20
        assert run.process.wait(20) == 75
    with supervised(directory) as again:
        again.wait_for_training(2)  # after a false notice it is simply started again
        assert again.end() == 0
