"""Robots of Isaac Lab and mjlab: an iteration of each under the learner, on made-up assets and motions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.elastic.collectives import SingleProcess
from tests.fakes import g1_motion
from tests.fakes.training import Worker, config, make_worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the simulators
]


def iterate(env: EnvSection) -> Worker:
    """One iteration of 16 envs; everything in it is finite."""
    worker = make_worker(replace(config(dtype="float32", rollout_steps=12), env=env), [0, 1])
    rollout = worker.collect(1)
    for name in rollout.step_fields:
        assert torch.isfinite(getattr(rollout, name)).all(), name
    worker.update(rollout, SingleProcess(), 1)
    worker.finish(rollout, SingleProcess())
    assert rollout.env_steps == 12 * 16
    worker.env.close()
    return worker


def test_isaaclab_go2_follows_velocities(assets: Path) -> None:
    env = EnvSection(
        backend="isaaclab",
        task="Isaac-Velocity-Flat-UnitreeGo2",
        block=8,
        overrides=("episode_length_s=0.2", "physics=newton_mjwarp"),
    )
    worker = iterate(env)
    spec = worker.env.spec
    assert (dict(spec.obs_dims), spec.action_dim) == ({"actor": 48}, 12)
    assert spec.max_episode_steps == 10
    figures = worker.history[0]
    assert any(name.startswith("episode/Episode_Reward/") for name in figures)
    assert figures["episode_length_mean"] <= 10


def test_mjlab_g1_tracks_a_motion(need: Callable[[str], None], tmp_path: Path) -> None:
    need("mjlab")
    motion = g1_motion.write(tmp_path / "squat.npz")
    env = EnvSection(
        backend="mjlab",
        task=g1_motion.TASK,
        block=8,
        overrides=(f'commands.motion.motion_file="{motion}"',),
    )
    worker = iterate(env)
    assert dict(worker.env.spec.obs_dims) == {"actor": 160, "critic": 286}
    assert worker.env.spec.action_dim == 29
