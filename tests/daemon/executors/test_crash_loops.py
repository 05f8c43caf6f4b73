"""Crash loops and program errors, with real processes and without torch."""

import json
from pathlib import Path

import pytest

from rallypoint.daemon.cli import main
from tests.fakes.supervised import Supervised, supervised, trains

pytestmark = [pytest.mark.slow]

QUICK = (
    *("--set", "membership.quarantine_after=2"),
    *("--set", "membership.quarantine_cooldown_s=600"),
)


def test_rule_08_a_slot_that_never_becomes_ready_is_quarantined_while_others_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [["die", 1, life, 0] for life in (1, 2)]
    with supervised(tmp_path / "run", *QUICK, worker={"faults": faults}) as run:
        place = ["--dir", str(run.rundir.path)]
        status = run.wait_for(lambda s: trains(s, 1) and s["workers"][1]["state"] == "quarantined")
        assert status["workers"][0]["incarnation"] == 1
        assert run.metrics()["slot_quarantined"] == 1
        assert main(["quarantine", "list", "--json", *place]) == 0
        (slot,) = json.loads(capsys.readouterr().out)
        assert (slot["node"], slot["slot"], slot["failures"]) == ("local", 1, 2)
        assert "signal 9" in slot["reason"]
        assert 0 < slot["seconds_left"] <= 600
        assert main(["quarantine", "list", *place]) == 0
        assert "local/1: 2 lives failed in a row" in capsys.readouterr().out
        assert main(["quarantine", "clear", "--slot", "0", *place]) == 1
        assert main(["quarantine", "clear", *place]) == 0
        assert "cleared: 1" in capsys.readouterr().out
        after = run.wait_for(lambda s: trains(s, 2) and s["workers"][1]["incarnation"] == 3)
        assert after["workers"][0]["pid"] == status["workers"][0]["pid"], "never disturbed"
        assert run.metrics()["slot_quarantined"] == 0
        assert main(["quarantine", "list", *place]) == 0
        assert "no slot is in quarantine" in capsys.readouterr().out
        assert run.end() == 0


def failed_once(run: Supervised) -> str:
    """The job fails with exit code 1; its reason, which has the traceback exactly once."""
    assert run.process.wait(60) == 1
    reason: str = run.logged("supervisor_ended")[0]["reason"]
    assert reason.startswith("program error: ")
    assert reason.count("Traceback: a fake error") == 1
    return reason


def test_rule_08_a_world_of_one_fails_when_it_raises_the_same_twice(tmp_path: Path) -> None:
    faults = [["raise", 0, life, 4] for life in range(1, 9)]
    with supervised(tmp_path / "run", "--workers", "1", worker={"faults": faults}) as run:
        assert "2 times" in failed_once(run)
        assert len(run.logged("worker_fault")) == 2, "no restart storm"


def test_rule_08_an_error_of_one_of_three_workers_is_a_loss(tmp_path: Path) -> None:
    worker = {"faults": [["raise", 1, 1, 4]]}
    with supervised(tmp_path / "run", "--workers", "3", worker=worker) as run:
        after = run.wait_for(lambda s: trains(s, 3) and s["workers"][1]["incarnation"] == 2)
        assert [w["incarnation"] for w in after["workers"]] == [1, 2, 1]
        assert run.end() == 0
