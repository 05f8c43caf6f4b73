"""Signals and drills as preemption notices: a real supervisor, workers without torch."""

import json
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.books import BooksFile
from rallypoint.daemon.executors.processes import WorkerProcess
from tests.fakes.metadata_server import ACTION, REBALANCE, azure_event, metadata_server
from tests.fakes.supervised import Status, Supervised, pids, supervised

pytestmark = [pytest.mark.slow]

GRACE_S = 6.0
"""It leaves a sixth of this before the deadline."""


def sources(*names: str) -> tuple[str, ...]:
    return ("--set", f"preemption.sources={json.dumps(names)}")


def last_iteration(run: Supervised) -> int:
    found: int = [line["iteration"] for line in run.journal() if line["event"] == "iteration"][-1]
    return found


def counted(run: Supervised) -> dict[tuple[str, str], float]:
    """Notices by source and kind, as the supervisor left them in its books."""
    books = BooksFile(run.rundir.books).read()
    assert books is not None
    found = [total for total in books.totals if total.name == "notices_total"]
    return {(total.labels["source"], total.labels["kind"]): total.value for total in found}


def last_checkpoint(run: Supervised) -> int:
    found: int = run.logged("checkpoint_committed")[-1]["iteration"]
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
        assert counted(run) == {(source, "leave"): 1}


def test_a_repeated_signal_kills_nothing(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", *sources("slurm")) as run:
        run.wait_for_training(2)
        run.process.send_signal(signal.SIGUSR1)
        assert run.end(signal.SIGTERM) == 75
        assert counted(run) == {("slurm", "leave"): 2}
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
        f"node.stop_grace_s={GRACE_S}",
        "--set",
        "membership.hang_s=20",
    )
    with supervised(tmp_path / "run", *options, worker={"faults": [["hang", 1, 1, 3]]}) as run:
        run.wait_for(hangs)
        sent_s = time.monotonic()
        assert run.end(signal.SIGTERM) == 75
        assert time.monotonic() - sent_s < GRACE_S
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
        assert run.process.wait(60) == 75
        assert counted(run) == {("drill", "leave"): 1}
    with supervised(directory) as again:
        again.wait_for_training(2)  # after a false notice it is simply started again
        assert again.end() == 0


def cloud(name: str, url: str) -> tuple[str, ...]:
    return (*sources(name), "--set", f"preemption.{name}_url={url}")


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_a_cloud_takes_the_machine_away(tmp_path: Path, name: str) -> None:
    with (
        metadata_server() as services,
        supervised(tmp_path / "run", *cloud(name, services.url)) as run,
    ):
        run.wait_for_training(2)
        metadata, left = services.metadata, list[tuple[list[WorkerProcess], int]]()
        match name:
            case "aws":
                at = datetime.fromtimestamp(metadata.time(120.0), UTC).isoformat()
                metadata.set(aws={ACTION: json.dumps({"action": "terminate", "time": at})})
            case "gcp":
                metadata.set_gcp("preempted", "TRUE")
            case "azure":
                metadata.set(
                    azure=[azure_event("e-1")],
                    at_approval=lambda: left.append((run.workers(), last_checkpoint(run))),
                )
        assert run.process.wait(60) == 75
        assert len(run.logged("notice_received")) == 1
        assert counted(run) == {(name, "leave"): 1}
        assert last_checkpoint(run) == last_iteration(run)
        assert metadata.approved == (["e-1"] if name == "azure" else [])
        drained: tuple[list[WorkerProcess], int] = ([], last_iteration(run))
        assert left == ([drained] if name == "azure" else []), "approved once it has drained"


def test_a_rebalance_recommendation_only_commits(tmp_path: Path) -> None:
    with (
        metadata_server() as services,
        supervised(tmp_path / "run", *cloud("aws", services.url)) as run,
    ):
        before = run.wait_for_training(2)
        hint = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
        services.metadata.set(aws={REBALANCE: hint})
        run.wait_for(lambda _: bool(run.logged("checkpoint_ordered")))
        after = run.wait_for(lambda s: s["iteration"] > before["iteration"] + 5)
        assert after["generation"] == before["generation"]
        assert run.metrics()['notices_total{kind="hint",source="aws"}'] == 1
        assert run.end() == 0


def test_a_metadata_service_that_is_down_disturbs_nothing(tmp_path: Path) -> None:
    with metadata_server() as gone:
        url = gone.url
    with supervised(tmp_path / "run", *cloud("azure", url)) as run:
        run.wait_for_training(2)
        (line,) = run.logged("metadata_unavailable")
        assert line["source"] == "azure"
        assert run.end() == 0


def test_after_a_false_notice_the_node_comes_back(tmp_path: Path) -> None:
    """GCP shows a preemption for ever: its deadline is remembered from when it was seen first."""
    with metadata_server() as services:
        services.metadata.set_gcp("preempted", "TRUE")
        options = cloud("gcp", services.url)
        with supervised(tmp_path / "run", *options) as run:
            assert run.process.wait(60) == 75
        memory = run.rundir.notices
        seen = {name: at_s - 120.0 for name, at_s in json.loads(memory.read_text()).items()}
        memory.write_text(json.dumps(seen))  # two minutes pass
        with supervised(tmp_path / "run", *options) as run:
            run.wait_for_training(2)
            assert run.logged("notice_false")
            assert run.metrics()['notices_total{kind="false",source="gcp"}'] == 1
            assert run.end(signal.SIGINT) == 0
