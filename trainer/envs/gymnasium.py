"""The backend ``gymnasium``: vector envs of the gymnasium API, by their id (extra ``gymnasium``).

gymnasium resets an env that ended in the next step (NEXT_STEP, its default), in the same one
(SAME_STEP), or leaves it to the caller (DISABLED). Here every episode begins in the step that ended the
one before: through ``reset_mask``, with a keyed seed for each env; or, where the vector env is
SAME_STEP, by itself. ``env.overrides``: ``vectorization`` is ``sync`` (default), ``async`` or ``native``
(the vector env that the task registers); others are keyword arguments of the env.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Capabilities, EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.simulator import RebuiltEnv, Seeds
from rallypoint.trainer.errors import EnvError

Ids = NDArray[np.int64]
Array = NDArray[Any]

_MODES: Final = {"sync": "sync", "async": "async", "native": "vector_entry_point"}
_STEP_DT_S: Final = 0.02
"""Of a task that does not say its frames per second."""
_GROUPS: Final = {"actor": "actor", "policy": "actor", "critic": "critic"}
"""Entries of a Dict of observations that are groups of their own."""


def make(request: EnvRequest) -> RebuiltEnv:
    """The backend. Raises `EnvError` when gymnasium is missing, does not know the task, or the task has
    other observations than boxes or other actions than one box."""
    try:
        import gymnasium
    except ImportError as error:
        raise EnvError(
            f'env.backend = "gymnasium" needs the extra: pip install "rallypoint[gymnasium]" ({error})'
        ) from error
    overrides = dict(request.overrides)
    mode = str(overrides.pop("vectorization", "sync"))
    if mode not in _MODES:
        raise EnvError(
            f"env.overrides: vectorization = {mode!r} must be one of {', '.join(_MODES)}"
        )

    def build(count: int) -> GymnasiumSimulator:
        own: dict[str, Any] = {}
        if mode != "native":
            own["vector_kwargs"] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        try:
            envs = gymnasium.make_vec(
                request.task,
                num_envs=count,
                vectorization_mode=_MODES[mode],
                **own,
                **overrides,
            )
        except (gymnasium.error.Error, TypeError) as error:
            raise EnvError(f"env.task = {request.task!r}: gymnasium says: {error}") from error
        return GymnasiumSimulator(envs, request, independent=mode != "native")

    return RebuiltEnv(build, request)


@dataclass(frozen=True)
class _Space:
    """Which entries of an observation make a group."""

    group: str
    keys: tuple[str, ...] | None
    """Of a Dict, in order; None: the observation is an array."""
    size: int

    def read(self, obs: Any, count: int) -> Array:
        parts = [obs] if self.keys is None else [obs[key] for key in self.keys]
        return np.concatenate([np.asarray(p, np.float64).reshape(count, -1) for p in parts], axis=1)


class GymnasiumSimulator:
    """A `Simulator` on a vector env."""

    def __init__(self, envs: Any, request: EnvRequest, *, independent: bool) -> None:
        """``independent``: each env has its own generator and is reset by its own seed."""
        self._envs = envs
        self._dtype = request.dtype
        self._count = int(envs.num_envs)
        self._mode = str(getattr(envs.metadata.get("autoreset_mode"), "value", "missing"))
        self._spaces = _spaces(request.task, envs.single_observation_space)
        self._low, self._high = _action_bounds(request.task, envs.single_action_space)
        self._action_shape = envs.single_action_space.shape
        self._obs: Any = None
        self._spec = self._describe(request, independent)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, rows: Ids, seeds: Ids) -> Mapping[str, Tensor]:
        """As `Simulator.reset`. Raises `EnvError` for a native vector env that cannot reset some of its
        envs alone, when it is asked to."""
        if self._obs is None:
            seed: Any = (
                seeds.tolist() if self._spec.capabilities.deterministic_split else int(seeds[0])
            )
            self._obs, _ = self._envs.reset(seed=seed)
        elif rows.size:
            self._reset_some(rows, seeds)
        return self._tensors(self._obs)

    def step(self, actions: Tensor, seeds: Seeds) -> StepResult:
        clipped = actions.cpu().numpy().astype(np.float64).clip(self._low, self._high)
        shaped = clipped.astype(self._envs.single_action_space.dtype)
        obs, reward, terminated, truncated, infos = self._envs.step(
            shaped.reshape(self._count, *self._action_shape)
        )
        ended = np.flatnonzero(terminated | truncated)
        final = self._arrays(obs)
        self._obs = obs
        if ended.size and self._mode == "SameStep":
            for row in ended:  # entries of others are absent, or of an earlier step
                whole = self._arrays(infos["final_obs"][row], 1)
                for group, values in final.items():
                    values[row] = whole[group][0]
        elif ended.size:
            self._reset_some(ended, seeds(ended))
        return StepResult(
            obs=self._tensors(self._obs),
            reward=torch.from_numpy(np.asarray(reward, np.float64)),
            terminated=torch.from_numpy(np.array(terminated, np.bool_)),
            truncated=torch.from_numpy(np.array(truncated, np.bool_)),
            final_obs={group: torch.from_numpy(values) for group, values in final.items()},
        )

    def close(self) -> None:
        self._envs.close()

    def _reset_some(self, rows: Ids, seeds: Ids) -> None:
        """Begin episodes in these rows alone."""
        mask = np.zeros(self._count, dtype=np.bool_)
        mask[rows] = True
        before = self._arrays(self._obs)
        chosen: list[int | None] = [None] * self._count
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            chosen[row] = seed
        independent = self._spec.capabilities.deterministic_split
        seed = chosen if independent else int(seeds[0])
        self._obs, _ = self._envs.reset(seed=seed, options={"reset_mask": mask})
        after = self._arrays(self._obs)
        if any((after[group][~mask] != before[group][~mask]).any() for group in after):
            raise EnvError(
                f"{self._spec.task}: its own vector env ({self._mode}) resets all envs where one is to be "
                "reset: it does not take options['reset_mask']; set vectorization=sync in env.overrides"
            )

    def _describe(self, request: EnvRequest, independent: bool) -> EnvSpec:
        registered = getattr(self._envs, "spec", None)
        limit = getattr(registered, "max_episode_steps", None)
        limit = request.overrides.get("max_episode_steps", limit)
        if limit is None:
            raise EnvError(
                f"env.task = {request.task!r} has no time limit; set max_episode_steps=N in env.overrides"
            )
        frames_per_s = self._envs.metadata.get("render_fps")
        bound = float(self._high.max(initial=0.0))
        bounded = bool((self._high == bound).all() and (self._low == -bound).all())
        return EnvSpec(
            task=request.task,
            obs_dims={space.group: space.size for space in self._spaces},
            action_dim=self._low.size,
            max_episode_steps=int(limit),
            step_dt_s=1.0 / frames_per_s if frames_per_s else _STEP_DT_S,
            capabilities=Capabilities(
                "rebuild",
                carry_state=False,
                final_obs=True,
                deterministic_split=independent,
                multi_instance=True,
            ),
            action_bound=bound if bounded and math.isfinite(bound) else None,
        )

    def _arrays(self, obs: Any, count: int | None = None) -> dict[str, Array]:
        many = self._count if count is None else count
        return {space.group: space.read(obs, many) for space in self._spaces}

    def _tensors(self, obs: Any) -> dict[str, Tensor]:
        return {g: torch.from_numpy(x).to(self._dtype) for g, x in self._arrays(obs).items()}


def _spaces(task: str, space: Any) -> tuple[_Space, ...]:
    """Groups of a space of observations. Raises `EnvError` for anything but boxes and a Dict of them."""
    from gymnasium.spaces import Box, Dict

    if isinstance(space, Box):
        return (_Space("actor", None, math.prod(space.shape)),)
    if not isinstance(space, Dict) or not all(isinstance(s, Box) for s in space.values()):
        raise EnvError(
            f"env.task = {task!r}: observations are {space}, not a Box or a Dict of them"
        )
    sizes = {key: math.prod(part.shape or ()) for key, part in space.items()}
    if not set(sizes) <= set(_GROUPS) or "actor" not in {_GROUPS[key] for key in sizes}:
        return (_Space("actor", tuple(sizes), sum(sizes.values())),)
    return tuple(_Space(_GROUPS[key], (key,), size) for key, size in sizes.items())


def _action_bounds(task: str, space: Any) -> tuple[Array, Array]:
    from gymnasium.spaces import Box

    if not isinstance(space, Box):
        raise EnvError(
            f"env.task = {task!r}: actions are {space}, and the policy gives real numbers (a Box)"
        )
    return space.low.astype(np.float64).reshape(-1), space.high.astype(np.float64).reshape(-1)
