"""Builds the env that the configuration names."""

from typing import Final, Protocol

import torch

from rallypoint.daemon.shared.config import Config
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


def make_env(config: Config, *, dtype: torch.dtype) -> EmbeddedEnv:
    """The env of ``config.env``, holding no envs yet: `assign` gives it some.

    ``dtype`` is that of observations and rewards. Raises `EnvError` when the task does not exist.
    """
    task = EMBEDDED_TASKS.get(config.env.task)
    if task is None:
        raise EnvError(
            f"env.task = {config.env.task!r} does not exist in the {config.env.backend} backend; "
            f"choose one of {', '.join(EMBEDDED_TASKS)}"
        )
    return task(seed=config.job.seed, dtype=dtype)
