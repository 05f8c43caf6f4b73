"""What all embedded envs share: global env ids, exact resizing, episodes, keyed draws, state rows.

A task gives `EmbeddedEnv` its per-env state as named float64 arrays of N rows and four functions over
them. Everything here and in the tasks is row by row: no value of one env depends on another env.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Capabilities, EnvSpec, StepResult
from rallypoint.trainer.errors import EnvError
from rallypoint.trainer.rng import Purpose, uniform

Array = NDArray[np.float64]

EMBEDDED: Final = Capabilities(
    resize="exact",
    carry_state=True,
    final_obs=True,
    deterministic_split=True,
    multi_instance=True,
)
_EPISODE_STEP: Final = "episode_step"
"""Name of the row that counts the steps of the present episode; every task has it."""


@dataclass(frozen=True)
class Outcome:
    """What a task says about one step, before episodes are ended."""

    reward: Array
    terminated: NDArray[np.bool_]
    figures: dict[str, Array]
    bins: NDArray[np.int64] | None = None
    """`StepResult.bins`."""
    reward_terms: dict[str, Array] = field(default_factory=dict)
    """`StepResult.reward_terms`."""


class EmbeddedEnv(ABC):
    """N envs of one task in this process; implements `rallypoint.trainer.envs.base.VecEnv`.

    A step ends episodes and starts the next ones at once; `StepResult.final_obs` has the observation
    before that, of every env. Observations are a function of the state rows alone.
    """

    start_draws: int
    """How many uniform draws an episode's start takes."""

    def __init__(self, spec: EnvSpec, *, seed: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._seed = seed
        self._dtype = dtype
        self._env_ids = np.zeros(0, dtype=np.int64)
        self._iteration = -1  # no rollout has begun
        self._rollout_step = 0
        self._state: dict[str, Array] = self._allocate(0) | {_EPISODE_STEP: np.zeros(0)}

    # What a task defines -------------------------------------------------------------------------

    @abstractmethod
    def _allocate(self, count: int) -> dict[str, Array]:
        """Fresh per-env state of ``count`` envs, by name; becomes ``self._state``."""

    @abstractmethod
    def _start(self, rows: NDArray[np.int64], draws: Array) -> None:
        """Write the start of an episode into the whole state of these rows; ``draws`` are uniform in
        [0, 1), ``[len(rows), start_draws]``."""

    @abstractmethod
    def _advance(self, actions: Array) -> Outcome:
        """Advance every env by one control step; the episode steps already count this one."""

    @abstractmethod
    def _observe(self) -> dict[str, Array]:
        """Observation groups of the present state, fresh arrays ``[N, D]``."""

    @abstractmethod
    def close(self) -> None:
        """Release what the simulator holds."""

    def _timed_out(self) -> NDArray[np.bool_]:
        """Episodes that have come to their time limit, ``[N]``."""
        out: NDArray[np.bool_] = self._episode_step >= self._spec.max_episode_steps
        return out

    # The VecEnv Protocol -------------------------------------------------------------------------

    @property
    def builds(self) -> int:
        """How often the simulator was built in this process; exact resizes are not builds."""
        return 1

    @property
    def capacity_envs(self) -> int | None:
        """Rows are small: no bound is known."""
        return None

    @property
    def spec(self) -> EnvSpec:
        """What is fixed about the task."""
        return self._spec

    @property
    def env_ids(self) -> NDArray[np.int64]:
        """Global ids of the rows, ascending, ``[N]``."""
        return self._env_ids.copy()

    def assign(self, env_ids: NDArray[np.int64], *, iteration: int) -> NDArray[np.int64]:
        """Own exactly these envs. Rows that stay go on bit for bit; new ones, which are given back, start
        an episode at a random phase (part of its time limit is already used up), drawn for this
        iteration.

        Raises `EnvError` when an id occurs twice.
        """
        new_ids = np.sort(np.asarray(env_ids, dtype=np.int64))
        if (new_ids[1:] == new_ids[:-1]).any():
            raise EnvError(f"env ids {new_ids[1:][new_ids[1:] == new_ids[:-1]]} are assigned twice")
        _, new_rows, old_rows = np.intersect1d(new_ids, self._env_ids, return_indices=True)
        fresh = np.setdiff1d(np.arange(new_ids.size), new_rows)
        old = self._state
        self._state = self._allocate(new_ids.size) | {_EPISODE_STEP: np.zeros(new_ids.size)}
        for name, values in self._state.items():
            values[new_rows] = old[name][old_rows]
        self._env_ids = new_ids
        draws = uniform(
            self._seed, Purpose.ENV_ASSIGN, new_ids[fresh], iteration, 0, 1 + self.start_draws
        )
        self._start(fresh, np.ascontiguousarray(draws[:, 1:]))
        self._episode_step[fresh] = np.floor(draws[:, 0] * self._spec.max_episode_steps)
        return new_ids[fresh]

    def begin_rollout(self, iteration: int) -> dict[str, Tensor]:
        """Key the draws that follow by this iteration, step 0; the present observations."""
        self._iteration, self._rollout_step = iteration, 0
        return self._tensors(self._observe())

    def step(self, actions: Tensor) -> StepResult:
        """One control step with actions ``[N, A]``. Raises `EnvError` for another shape, for actions
        that are not finite, and before the first `begin_rollout`."""
        values = self._checked(actions)
        self._state[_EPISODE_STEP] += 1
        outcome = self._advance(values)
        truncated = self._timed_out() & ~outcome.terminated
        final = self._observe()
        ended = np.flatnonzero(outcome.terminated | truncated)
        if ended.size:
            self._episode_step[ended] = 0
            self._start(ended, self._uniform(Purpose.ENV_RESET, ended, self.start_draws))
        self._rollout_step += 1
        return StepResult(
            obs=self._tensors(self._observe() if ended.size else final),
            reward=torch.from_numpy(outcome.reward).to(self._dtype, copy=True),
            terminated=torch.from_numpy(outcome.terminated.copy()),
            truncated=torch.from_numpy(truncated),
            figures={
                name: torch.from_numpy(figure.copy()) for name, figure in outcome.figures.items()
            },
            reward_terms={name: torch.from_numpy(x) for name, x in outcome.reward_terms.items()},
            final_obs=self._tensors(final),
            bins=None if outcome.bins is None else torch.from_numpy(outcome.bins.copy()),
        )

    def rows(self) -> dict[str, Array]:
        """Copies of all per-env state, ``[N, ...]`` each, in the order of `env_ids`."""
        return {name: values.copy() for name, values in self._state.items()}

    def load_rows(self, env_ids: NDArray[np.int64], rows: Mapping[str, Array]) -> None:
        """Put rows that `rows` gave, of this task and simulator version, into these envs.

        Raises `EnvError` when an env is not owned or the rows are not of this task.
        """
        ids = np.asarray(env_ids, dtype=np.int64)
        foreign = np.setdiff1d(ids, self._env_ids)
        if foreign.size:
            raise EnvError(f"{self._spec.task}: rows given for envs {foreign}, which are not owned")
        expected = {name: (ids.size, *values.shape[1:]) for name, values in self._state.items()}
        found = {name: values.shape for name, values in rows.items()}
        if expected != found:
            raise EnvError(
                f"{self._spec.task}: rows do not fit this task and simulator version; expected "
                f"{expected}, found {found}"
            )
        where = np.searchsorted(self._env_ids, ids)
        for name, values in self._state.items():
            values[where] = rows[name]

    # Helpers for tasks ---------------------------------------------------------------------------

    @property
    def _episode_step(self) -> Array:
        return self._state[_EPISODE_STEP]

    def _uniform(self, purpose: Purpose, rows: NDArray[np.int64], n: int) -> Array:
        """Uniform draws of these rows at the present step of the rollout, ``[len(rows), n]``."""
        ids = self._env_ids[rows]
        return uniform(self._seed, purpose, ids, self._iteration, self._rollout_step, n)

    def _checked(self, actions: Tensor) -> Array:
        """The actions as float64, if a step can be taken with them."""
        expected = (self._env_ids.size, self._spec.action_dim)
        if tuple(actions.shape) != expected:
            raise EnvError(
                f"{self._spec.task}: actions have shape {tuple(actions.shape)}, expected {expected} "
                "(owned envs, action_dim)"
            )
        if self._iteration < 0:
            raise EnvError(f"{self._spec.task}: step() before the first begin_rollout()")
        values: Array = actions.detach().cpu().numpy().astype(np.float64)
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            raise EnvError(
                f"{self._spec.task}: actions of envs {self._env_ids[~finite]} are not finite"
            )
        return values

    def _tensors(self, observations: Mapping[str, Array]) -> dict[str, Tensor]:
        return {
            group: torch.from_numpy(values).to(self._dtype, copy=True)
            for group, values in observations.items()
        }


def total(terms: Mapping[str, Array]) -> Array:
    """Sum of reward terms, in their order."""
    first, *others = terms.values()
    return functools.reduce(np.add, others, first)


def between(draws: Array, low: float, high: float) -> Array:
    """Uniform draws in [0, 1) mapped to [low, high)."""
    return low + (high - low) * draws


def row_sum(values: Array) -> Array:
    """Sum over the columns of each row, ``[N, D] -> [N]``, in an order that N does not change."""
    total: Array = np.ascontiguousarray(values).sum(axis=1)
    return total
