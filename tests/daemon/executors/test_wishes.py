"""pause, resume and scale on a real supervisor with workers without torch."""

import json
import os
import signal
from pathlib import Path

import pytest

from rallypoint.daemon.cli import main
from tests.fakes.supervised import pids, supervised, trains

pytestmark = [pytest.mark.slow]


def test_a_paused_job_waits_warm_survives_its_supervisor_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # so that no cell of the picture is wrapped
    place = ("--dir", str(tmp_path / "run"))
    patient = {"grace_s": 60.0}
    with supervised(tmp_path / "run", worker=patient) as run:
        before = run.wait_for_training(2)
        assert main(["resume", *place]) == 1
        assert "refused: the job is not paused" in capsys.readouterr().err
        assert main(["pause", *place, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["state"], answer["done"], answer["world_size"]) == ("paused", True, 2)
        assert answer["reason"] == "rallypoint pause on node local"
        paused = run.status()
        assert main(["status", *place, "--watch"]) == 0  # no terminal: one picture
        picture = capsys.readouterr().out
        assert "planned, scale (holds)" in picture
        assert "waiting" in picture
        assert pids(paused) == pids(before)
        assert main(["pause", *place]) == 1
        run.end(signal.SIGKILL)
        with supervised(tmp_path / "run", worker=patient) as successor:
            again = successor.wait_for(lambda s: pids(s) == pids(before))
            assert (again["state"], again["iteration"]) == ("paused", paused["iteration"])
            assert main(["resume", *place]) == 0
            after = successor.wait_for(
                lambda s: trains(s, 2) and s["iteration"] > paused["iteration"]
            )
            assert pids(after) == pids(before)
            causes = [g["cause"] for g in successor.journal() if g["event"] == "generation"]
            assert causes[-2:] == ["scale", "scale"]
            assert successor.end() == 0


def test_a_job_that_was_stopped_while_paused_is_paused_when_it_starts_again(tmp_path: Path) -> None:
    place = ("--dir", str(tmp_path / "run"))
    with supervised(tmp_path / "run") as run:
        run.wait_for_training(2)
        assert main(["pause", *place]) == 0
        assert main(["stop", *place]) == 0
        assert run.process.wait(60) == 0
    with supervised(tmp_path / "run") as again:
        again.wait_for(lambda s: {w["state"] for w in s["workers"]} == {"waiting"})
        assert again.status()["state"] == "paused"
        assert main(["resume", *place]) == 0
        again.wait_for_training(2)
        assert again.end() == 0


def test_scaling_down_keeps_who_is_let_go_warm_and_up_lets_it_in_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--dir", str(tmp_path / "run"))
    with supervised(tmp_path / "run", "--workers", "3") as run:
        before = run.wait_for_training(3)
        assert main(["scale", *place, "--workers", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["world_size"] == 1
        alone = run.wait_for(lambda s: min(w["state"] for w in s["workers"]) == "ready")
        assert sorted(w["state"] for w in alone["workers"]) == ["ready", "ready", "training"]
        assert pids(alone) == pids(before)
        (rank0,) = (w for w in alone["workers"] if w["rank"] == 0)
        os.kill(rank0["pid"], signal.SIGKILL)
        run.wait_for(lambda s: trains(s, 1) and s["generation"] > alone["generation"])
        assert main(["scale", *place, "--workers", "3"]) == 0
        run.wait_for(lambda s: trains(s, 3))
        for refused in ("0", "4"):
            assert main(["scale", *place, "--workers", refused]) == 1
            assert "job.max_workers = 3" in capsys.readouterr().err
        assert run.end() == 0
