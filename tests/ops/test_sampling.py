"""The picture of adaptive motion sampling."""

import json
from pathlib import Path

import pytest

from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops import sampling
from rallypoint.trainer.elastic.collectives import SingleProcess
from tests.fakes.checkpoints import save
from tests.fakes.training import config, make_worker


def journal(directory: Path, history: list[dict[str, float]]) -> None:
    lines = [
        {"event": "iteration", "iteration": i, "env_steps_total": 10 * i, "metrics": figures}
        for i, figures in enumerate(history, 1)
    ]
    (directory / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_picture_shows_where_a_run_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(task="humanoid-track", dtype="float32", init_std=2.0, rollout_steps=64)
    worker = make_worker(settings, (0,))
    rollout = worker.collect(1)
    worker.finish(rollout, SingleProcess())
    save(tmp_path / "checkpoints", worker, settings)
    journal(tmp_path, worker.history)
    read = sampling.read_sampling(RunDir(tmp_path))
    assert (read.env_steps, len(read.entropy)) == ([10], 1)
    assert read.greatest == [pytest.approx(read.over_frames.max())]
    assert rollout.terminated.any()
    assert read.over_frames[read.failure_rate.argmax()] == read.over_frames.max() > 1.0
    assert sampling.main([str(tmp_path)]) == 0
    assert (tmp_path / "sampling.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "sampling.png") in capsys.readouterr().out


@pytest.mark.slow
def test_a_task_without_motions_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(task="cartpole")
    save(tmp_path / "checkpoints", make_worker(settings, (0,)), settings)
    journal(tmp_path, [])
    assert sampling.main([str(tmp_path)]) == 1
    assert "'cartpole' follows no motions" in capsys.readouterr().err
