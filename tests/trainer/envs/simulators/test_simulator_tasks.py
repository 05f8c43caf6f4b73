"""Robots of Isaac Lab and mjlab: an iteration of each under the learner, on made-up assets and motions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import EnvRequest
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


def cartpole_rates(state: Tensor, force_n: float) -> Tensor:
    """Of ``[N, 4]``: place (m) and angle (rad) of cart and upright pole, and their velocities, from
    Lagrange's equations for Isaac Lab's own robot: 1 kg each, a pole of 0.04 by 0.06 by 1 m whose centre
    is 0.47 m above the hinge, and 10 N s/m of damping on the rail."""
    (_, angle, speed, turn), kg, arm_m = state.T, 1.0, 0.47
    across = -kg * arm_m * angle.cos()
    along = kg + kg
    about = torch.full_like(angle, kg * (0.06**2 + 1.0**2) / 12 + kg * arm_m**2)
    push = force_n - 10.0 * speed - kg * arm_m * angle.sin() * turn.square()
    fall = kg * 9.81 * arm_m * angle.sin()
    whole = along * about - across.square()
    return torch.stack(
        [
            speed,
            turn,
            (about * push - across * fall) / whole,
            (along * fall - across * push) / whole,
        ]
    ).T


def test_isaaclab_cartpole_moves_and_falls_by_the_laws_of_mechanics(assets: Path) -> None:
    env = find_backend("isaaclab")(EnvRequest("Isaac-Cartpole-Direct", seed=1, num_envs=16))
    env.assign(np.arange(16), iteration=0)
    state = began = env.begin_rollout(0)["actor"].double()
    ended = torch.zeros(16, dtype=torch.bool)
    fine_s = 1 / 60 / 50
    for _ in range(15):  # a quarter of a second
        step = env.step(torch.full((16, 1), 0.1))  # 10 N
        ended |= step.terminated | step.truncated
        for _ in range(50):
            half = state + fine_s / 2 * cartpole_rates(state, 10.0)
            state = state + fine_s * cartpole_rates(half, 10.0)
    env.close()
    assert (~ended).sum() >= 8
    moved = (state - began)[~ended].abs().amax(0)
    assert (moved[:2] > torch.tensor([0.1, 0.3])).all(), "there is something to compare"
    found = step.obs["actor"].double()
    assert (found - state)[~ended].abs().amax() < 0.05


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
