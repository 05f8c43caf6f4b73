"""How well a policy tracks each clip of a motion library, beside no action at all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import MotionEnv
from rallypoint.trainer.errors import EnvError

FIGURE: Final = "tracking_error_rad"
"""The env's figure that is squared and averaged: root mean square over joints."""
_Policy = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class ClipEvaluation:
    """One clip, tracked from frame 0 to its end; a field of ``rallypoint eval --json``."""

    clip: str
    episodes: int
    survival: float
    """Fraction of episodes that came to the end of the clip."""
    rmse_rad: float
    """Root mean square error of joint positions over joints and live env steps."""
    zero_survival: float
    """The same with actions of zero."""
    zero_rmse_rad: float


@torch.no_grad()
def evaluate_clips(
    policy: _Policy, env: MotionEnv, episodes: int, *, first_env_id: int
) -> tuple[ClipEvaluation, ...]:
    """Run ``policy`` (actions for observations) and no action from frame 0 of every clip, in
    ``episodes`` envs in all, at least one for each clip; random draws are keyed by iteration 0. Raises `EnvError`
    when the env has no library."""
    if env.spec.library is None:
        raise EnvError(f"task {env.spec.task!r} takes clips, but its spec has no motion library")
    names = env.spec.library.clips
    count = max(episodes, len(names))
    clips = np.arange(count) % len(names)
    ids = np.arange(first_env_id, first_env_id + count)
    found = _track(policy, env, ids, clips)
    shape = (count, env.spec.action_dim)
    zero = _track(lambda obs: obs["actor"].new_zeros(shape), env, ids, clips)
    return tuple(
        ClipEvaluation(
            name, int((clips == c).sum()), *_mean(found, clips == c), *_mean(zero, clips == c)
        )
        for c, name in enumerate(names)
    )


@dataclass(frozen=True)
class _Tracked:
    """Per env ``[N]``."""

    survived: NDArray[np.bool_]
    squares: NDArray[np.float64]
    steps: NDArray[np.float64]


def _track(
    policy: _Policy, env: MotionEnv, ids: NDArray[np.int64], clips: NDArray[np.int64]
) -> _Tracked:
    env.assign(ids, iteration=0)
    env.begin_rollout(0)
    obs = env.start_clips(clips)
    live = np.ones(len(clips), dtype=bool)
    survived, squares, steps = np.zeros_like(live), np.zeros(len(clips)), np.zeros(len(clips))
    while live.any():
        result = env.step(policy(obs))
        obs = result.obs
        squares[live] += result.figures[FIGURE].numpy()[live] ** 2
        steps += live
        survived |= live & result.truncated.numpy()
        live &= ~(result.terminated | result.truncated).numpy()
    return _Tracked(survived, squares, steps)


def _mean(tracked: _Tracked, rows: NDArray[np.bool_]) -> tuple[float, float]:
    """Survival and error of some envs."""
    mean_square = tracked.squares[rows].sum() / tracked.steps[rows].sum()
    return float(tracked.survived[rows].mean()), float(np.sqrt(mean_square))
