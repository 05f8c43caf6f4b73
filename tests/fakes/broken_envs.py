"""Envs that break one rule of the contract each, in the way in which real ones do."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.pointmass import PointMass

Ids = NDArray[np.int64]


class _Changed(PointMass):
    """A point mass that does one thing wrong."""

    def __init__(self, request: EnvRequest) -> None:
        super().__init__(seed=request.seed, dtype=request.dtype)


class NoTime(_Changed):
    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, step_dt_s=0.0)


class NoActor(_Changed):
    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, obs_dims={"policy": 6})


class DoubleReward(_Changed):
    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        return replace(result, reward=result.reward.double())


class ColumnReward(_Changed):
    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        return replace(result, reward=result.reward[:, None])


class NextStep(_Changed):
    """Resets an env in the step after the one that ended its episode, as gymnasium does by default."""

    _late: StepResult | None = None

    def step(self, actions: Tensor) -> StepResult:
        result, late = super().step(actions), self._late
        ended = (result.terminated | result.truncated)[:, None]
        obs = {g: torch.where(ended, (result.final_obs or {})[g], x) for g, x in result.obs.items()}
        reward = result.reward
        if late is not None:
            reward = torch.where(late.terminated | late.truncated, 0.0, reward)
        self._late = result
        return replace(result, obs=obs, reward=reward)


class Both(_Changed):
    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        return replace(result, terminated=result.terminated | result.truncated)


class TooLong(_Changed):
    def _timed_out(self) -> NDArray[np.bool_]:
        late: NDArray[np.bool_] = self._episode_step >= self.spec.max_episode_steps + 10
        return late


class StaleExtras(_Changed):
    """Keeps ``final_obs`` of the first episode that ended in each row, as a dict that is never cleared."""

    _stale: dict[int, Tensor]

    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        self._stale = getattr(self, "_stale", {})
        final = {g: x.clone() for g, x in (result.final_obs or {}).items()}
        for row in (result.terminated | result.truncated).nonzero()[:, 0].tolist():
            final["actor"][row] = self._stale.setdefault(row, final["actor"][row].clone())
        return replace(result, final_obs=final)


class OneBuffer(_Changed):
    """Hands out the same reward tensor on every step."""

    _buffer: Tensor | None = None

    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        if self._buffer is None or self._buffer.shape != result.reward.shape:
            self._buffer = result.reward
        self._buffer.copy_(result.reward)
        return replace(result, reward=self._buffer)


class ClipsInPlace(_Changed):
    def step(self, actions: Tensor) -> StepResult:
        return super().step(actions.clamp_(-0.5, 0.5))


class Reseeds(_Changed):
    def __init__(self, request: EnvRequest) -> None:
        super().__init__(request)
        torch.manual_seed(request.seed)


class Unseeded(_Changed):
    def _start(self, rows: Ids, draws: NDArray[np.float64]) -> None:
        super()._start(rows, np.random.default_rng().random(draws.shape))


class SameEpisodes(_Changed):
    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        return super().assign(env_ids, iteration=1)


class WiderBound(_Changed):
    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, action_bound=0.25)


class CutsAll(_Changed):
    """Declares that rows stay, and begins all of them anew."""

    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        super().assign(env_ids[:0], iteration=iteration)
        return super().assign(env_ids, iteration=iteration)


class SilentlyCuts(CutsAll):
    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        new = np.setdiff1d(env_ids, self.env_ids)
        super().assign(env_ids, iteration=iteration)
        return new


class TakesTwice(_Changed):
    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        return super().assign(np.unique(env_ids), iteration=iteration)


class Together(_Changed):
    """What an env sees depends on the others."""

    def _observe(self) -> dict[str, NDArray[np.float64]]:
        obs = super()._observe()
        return {"actor": obs["actor"] + (obs["actor"].mean(axis=0) if len(obs["actor"]) else 0)}


class ForgetsRows(_Changed):
    def load_rows(self, env_ids: Ids, rows: Mapping[str, NDArray[np.float64]]) -> None:
        pass


class Shared(_Changed):
    """All instances count steps together, and push with them."""

    _steps = 0

    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        Shared._steps = 0
        return super().assign(env_ids, iteration=iteration)

    def step(self, actions: Tensor) -> StepResult:
        Shared._steps += 1
        return super().step(actions * (Shared._steps % 3))


class Leaks(_Changed):
    """The module keeps what each instance held."""

    kept: Final[list[Any]] = []

    def __init__(self, request: EnvRequest) -> None:
        super().__init__(request)
        self.kept.append(np.ones(2**20))  # 8 MiB

    def close(self) -> None:
        super().close()


class LeavesThreads(_Changed):
    """A thread per instance, which only the end of the test ends."""

    over = threading.Event()

    def __init__(self, request: EnvRequest) -> None:
        super().__init__(request)
        threading.Thread(target=self.over.wait, daemon=True).start()


BROKEN: Final[dict[str, tuple[str, Callable[[EnvRequest], PointMass], str]]] = {
    "no_time": ("spec", NoTime, r"step_dt_s = 0.0 must be above 0"),
    "no_actor": ("spec", NoActor, r"'policy'.*'actor' must be one of them"),
    "double_reward": ("shapes", DoubleReward, r"reward is \(8,\) of torch.float64; it must be"),
    "column_reward": ("shapes", ColumnReward, r"reward is \(8, 1\).* must be \(8,\)"),
    "next_step": ("auto_reset", NextStep, r"still that of the old episode"),
    "both_flags": ("auto_reset", Both, r"terminated and truncated; termination wins"),
    "too_long": ("time_limit", TooLong, r"goes on past max_episode_steps = 50"),
    "stale_extras": ("final_obs", StaleExtras, r"is that of step \d+: a stale entry of extras"),
    "one_buffer": (
        "aliasing",
        OneBuffer,
        r"reward of step 1 and reward of step 0 are the same mem",
    ),
    "clips_in_place": ("aliasing", ClipsInPlace, r"step 0 changed the actions"),
    "reseeds": ("randomness", Reseeds, r"generator of torch is not where it was"),
    "unseeded": ("seed", Unseeded, r"with the same seed and actions differ"),
    "same_episodes": ("seed", SameEpisodes, r"iteration 2 begin as those of iteration 1"),
    "wider_bound": ("action_bound", WiderBound, r"action_bound = 0.25 is declared"),
    "cuts_all": ("resize", CutsAll, r"episodes of envs that stay began anew"),
    "silently_cuts": ("resize", SilentlyCuts, r"envs that stay do not go on"),
    "takes_twice": ("refusals", TakesTwice, r"occurs twice: taken without an EnvError"),
    "together": ("split", Together, r"alone differ from the same envs among 8 in step 0"),
    "forgets_rows": ("carried", ForgetsRows, r"carry_state is declared, but"),
    "shared": ("instances", Shared, r"runs otherwise beside another one"),
    "leaks": ("leaks", Leaks, r"each of 6 builds left \d+\.\d MiB behind"),
    "leaves_threads": ("close", LeavesThreads, r"after close\(\) there are 1 more threads"),
}
"""Name to rule, env, and the words that it is to be found with."""
