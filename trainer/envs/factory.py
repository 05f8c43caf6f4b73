"""Builds the env that the configuration names."""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.envs.backends import find_backend, parse_overrides
from rallypoint.trainer.envs.base import CPU, EnvRequest, VecEnv
from rallypoint.trainer.envs.cartpole import CartPole
from rallypoint.trainer.envs.embedded import EmbeddedEnv
from rallypoint.trainer.envs.humanoid import HumanoidTrack
from rallypoint.trainer.envs.pointmass import PointMass
from rallypoint.trainer.envs.quadruped import QuadrupedVelocity
from rallypoint.trainer.errors import EnvError


class _Task(Protocol):
    def __call__(self, *, seed: int, dtype: torch.dtype) -> EmbeddedEnv: ...


EMBEDDED_TASKS: Final[dict[str, _Task]] = {
    "quadruped-velocity": QuadrupedVelocity,
    "humanoid-track": HumanoidTrack,
    "cartpole": CartPole,
    "pointmass": PointMass,
}
"""Tasks of the embedded backend; the same names as in `rallypoint.daemon.shared.tasks`."""


def embedded(request: EnvRequest) -> EmbeddedEnv:
    """The backend ``embedded``. Raises `EnvError` when the task does not exist, and for overrides."""
    task = EMBEDDED_TASKS.get(request.task)
    if task is None:
        raise EnvError(
            f"env.task = {request.task!r} does not exist in the embedded backend; "
            f"choose one of {', '.join(EMBEDDED_TASKS)}"
        )
    if request.overrides:
        raise EnvError(
            f"env.overrides: the embedded backend has none, but {sorted(request.overrides)} are given"
        )
    return task(seed=request.seed, dtype=request.dtype)


def make_env(
    config: Config,
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
    num_envs: int | None = None,
    process: str = "",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> VecEnv:
    """The env of ``config.env``, holding no envs yet: `assign` gives it some.

    ``dtype`` is that of observations and rewards; ``num_envs`` is how many it will probably hold, one
    env block where nobody knows; ``process`` is as in `EnvRequest`; ``on_stage`` is told in words what is
    being built. Raises `EnvError` when the backend or its task does not exist.
    """
    section = config.env
    request = EnvRequest(
        task=section.task,
        seed=config.job.seed,
        dtype=dtype,
        device=device,
        num_envs=section.block if num_envs is None else num_envs,
        max_envs=section.max_envs,
        rollout_steps=config.ppo.rollout_steps,
        overrides=parse_overrides(section.overrides),
        process=process,
        on_stage=on_stage,
    )
    return find_backend(section.backend)(request)


def expected_envs(config: Config) -> int:
    """How many envs a worker of a job at its full world size holds, if it is the last to enter: what is
    slow to build is built for these before the worker says ready."""
    ranks = 1
    if config.env.budget == "global":
        ranks = envbudget.world_size_range(config)[1]
    return envbudget.split(config.env.num_envs, ranks, config.env.block)[-1]
