"""Policies drawn without a display, by both renderers that need none."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import av
import matplotlib.image
import numpy as np
import pytest
import torch

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.envs.base import DrawnEnv
from rallypoint.trainer.envs.factory import EMBEDDED_TASKS
from rallypoint.trainer.policies.play import COMMAND, RENDERERS, PlayError, draw, play, record
from tests.fakes.checkpoints import save
from tests.fakes.training import config, make_worker

pytestmark = pytest.mark.slow


def checkpoint(directory: Path, task: str) -> str:
    settings = config(task=task, dtype="float32")
    return str(save(directory, make_worker(settings, [0]), settings, iteration=3))


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args(arguments))


def shows_something(image: np.ndarray) -> bool:
    """Neither empty nor of one colour: sky, floor and a robot."""
    return len(np.unique((image[..., :3] * 31).astype(int).reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("task", EMBEDDED_TASKS)
def test_every_task_can_be_drawn(task: str, tmp_path: Path) -> None:
    loaded = load_checkpoint(checkpoint(tmp_path / "c", task))
    done = play(loaded, tmp_path / "o.png", 1, 0.2, (160, 120))
    assert (done.task, done.iteration, done.frames) == (task, 3, 1)
    image = matplotlib.image.imread(tmp_path / "o.png")
    assert image.shape[:2] == (120, 160)
    assert shows_something(image)


def test_what_is_drawn_is_of_the_curriculum_of_the_checkpoint(tmp_path: Path) -> None:
    backend = EnvSection(backend="tests.fakes.toy_simulator:hard_cartpole", task="cartpole")
    settings = replace(config(dtype="float32"), env=backend)
    worker = make_worker(settings, [0])
    for hard in (0.0, 1.0):
        worker.live()["curriculum/hard"].fill_(hard)
        loaded = load_checkpoint(str(save(tmp_path / str(hard), worker, settings)))
        assert play(loaded, tmp_path / "o.png", 1, 0.1, (160, 120)).fell == hard


def test_both_renderers_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    env = EMBEDDED_TASKS["quadruped-velocity"](seed=1, dtype=torch.float32)
    assert isinstance(env, DrawnEnv)
    env.assign(np.arange(1), iteration=0)
    images = []
    for renderer in RENDERERS:
        monkeypatch.setenv("MUJOCO_GL", renderer)
        path = tmp_path / f"{renderer}.png"
        assert draw(env.scene, env.positions(), path, 50, (160, 120)) == renderer
        images.append(matplotlib.image.imread(path))
    env.close()
    assert shows_something(images[0])
    assert np.abs(images[0] - images[1]).mean() < 0.01


def test_a_video_has_every_step_of_every_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = checkpoint(tmp_path / "c", "cartpole")
    video = tmp_path / "deep" / "o.mp4"
    options = ("--episodes", "2", "--seconds", "0.2", "--size", "160x120", "--json")
    assert run(url, "--video", str(video), *options) == 0
    said = json.loads(capsys.readouterr().out)
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        images = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert float(stream.average_rate or 0) == 50
    assert len(images) == said["frames"] == 2 * 11
    assert images[0].shape == (120, 160, 3)
    assert not np.array_equal(images[0], images[10])
    assert said["renderer"] in RENDERERS
    assert list(video.parent.iterdir()) == [video]


def test_what_falls_ends_its_part() -> None:
    """An untrained quadruped: each episode is cut where the task terminates it."""
    settings = config(task="quadruped-velocity", dtype="float32")
    worker = make_worker(settings, [0])
    with torch.no_grad():
        for parameter in worker.learner.module.actor.parameters():
            parameter.mul_(5)
    assert isinstance(worker.env, DrawnEnv)
    recorded = record(worker.learner, worker.env, 2, 400)
    assert recorded.fell == 2
    heights = recorded.positions[:, 2]
    assert 2 < len(heights) < 2 * 401
    starts = np.flatnonzero(heights > 0.319)  # where episodes begin, and nowhere else
    assert list(starts) == [0, starts[1]]
    assert starts[1] > 1


def test_clips_are_played_in_turn_from_their_beginning() -> None:
    settings = config(task="humanoid-track", dtype="float32")
    worker = make_worker(settings, [0])
    assert isinstance(worker.env, DrawnEnv)
    recorded = record(worker.learner, worker.env, 3, 1)
    firsts = recorded.positions[::2]
    assert len(firsts) == 3
    assert not np.array_equal(firsts[0, 7:], firsts[1, 7:])


def test_a_renderer_that_does_not_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glfw")  # needs a display
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    loaded = load_checkpoint(checkpoint(tmp_path / "c", "cartpole"))
    with pytest.raises(PlayError, match=r"no renderer works here \(glfw: .*libosmesa6"):
        play(loaded, tmp_path / "o.png", 1, 0.1, (160, 120))
    assert not (tmp_path / "o.png").exists()


def test_a_video_without_the_extra_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without" / "av").mkdir(parents=True)
    (tmp_path / "without" / "av" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    )
    loaded = load_checkpoint(checkpoint(tmp_path / "c", "cartpole"))
    with pytest.raises(PlayError, match=r"package av.*pip install 'rallypoint\[play\]'"):
        play(loaded, tmp_path / "o.mp4", 1, 0.1, (160, 120))


@pytest.mark.parametrize("size", ["960", "0x0", "961x540", "9999x540", "axb"])
def test_sizes_that_cannot_be_are_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("somewhere", "--size", size)
    assert size in capsys.readouterr().err


def test_the_name_of_the_file_says_its_kind(tmp_path: Path) -> None:
    with pytest.raises(PlayError, match=r"must end in \.png"):
        run("somewhere", "--png", str(tmp_path / "o.jpg"))
