"""A simulator of a fixed number of envs that behaves as badly as real ones may: it hands out the same
tensors again, reseeds the global generators, and draws from them."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Capabilities, EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.cartpole import CartPole
from rallypoint.trainer.envs.simulator import RebuiltEnv, Rows, Seeds

LIMIT = 20
CAPABILITIES = Capabilities(
    "rebuild",
    carry_state=False,
    final_obs=True,
    deterministic_split=False,
    multi_instance=True,
)


class Toy:
    """A point on a line that is pushed; outside of ±2 its episode is over."""

    def __init__(self, count: int, seed: int, capabilities: Capabilities = CAPABILITIES) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.spec = EnvSpec("toy", {"actor": 3, "critic": 4}, 1, LIMIT, 0.1, capabilities)
        self._state = torch.zeros(count, 3)  # position, velocity, steps
        self._obs = {"actor": torch.zeros(count, 3), "critic": torch.zeros(count, 4)}
        self._reward = torch.zeros(count)

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> Mapping[str, Tensor]:
        generator = np.random.default_rng(seeds)
        start = torch.from_numpy(generator.uniform(-1, 1, (len(rows), 2)))
        self._state[rows, :2] = start.to(self._state)
        self._state[rows, 2] = 0
        return self._observe()

    def step(self, actions: Tensor, seeds: Seeds) -> StepResult:
        position, velocity, steps = self._state.T
        noise = 1e-5 * torch.randn(len(steps))  # of the global generator, which no rows carry
        velocity += 0.1 * actions[:, 0].clamp(-1, 1).to(velocity) + noise
        position += 0.1 * velocity
        steps += 1
        terminated, truncated = position.abs() > 2, steps >= LIMIT
        self._reward[:] = 1 - position.abs()
        final = {group: x.clone() for group, x in self._observe().items()}
        ended = (terminated | truncated).nonzero()[:, 0].numpy()
        if ended.size:
            self.reset(ended, seeds(ended))
        return StepResult(self._obs, self._reward, terminated, truncated, {}, {}, final)

    def rows(self) -> Rows:
        return {"state": self._state.double().numpy().copy()}

    def load_rows(self, rows: NDArray[np.int64], values: Rows) -> Mapping[str, Tensor]:
        self._state[rows] = torch.from_numpy(values["state"]).to(self._state)
        return self._observe()

    def close(self) -> None:
        self._state = torch.zeros(0, 3)

    def _observe(self) -> Mapping[str, Tensor]:
        self._obs["actor"][:] = self._state * torch.tensor([1, 1, 1 / LIMIT])
        self._obs["critic"][:, :3] = self._obs["actor"]
        self._obs["critic"][:, 3] = self._state[:, 0] ** 2
        return self._obs


class AdaptiveToy(Toy):
    """Starts further out with every iteration in which an episode ended; where each env starts is kept
    with it, as domain randomisation is."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed, replace(CAPABILITIES, carry_state=True))
        self._reach = 0.0
        self._start = torch.zeros(count)

    def first_curriculum(self) -> Mapping[str, Tensor]:
        return {"reach": torch.zeros(1, dtype=torch.float64)}

    def set_curriculum(self, values: Mapping[str, Tensor]) -> None:
        self._reach = values["reach"].item()

    def next_curriculum(
        self, values: Mapping[str, Tensor], figures: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        return {"reach": values["reach"] + 0.01 * ("episode_return_mean" in figures)}

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> Mapping[str, Tensor]:
        super().reset(rows, seeds)
        self._start[rows] = self._reach * self._state[rows, 0].sign()
        self._state[rows, 0] += self._start[rows]
        return self._observe()

    def rows(self) -> Rows:
        return {**super().rows(), "start": self._start.double().numpy().copy()}

    def load_rows(self, rows: NDArray[np.int64], values: Rows) -> Mapping[str, Tensor]:
        self._start[rows] = torch.from_numpy(values["start"]).to(self._start)
        return super().load_rows(rows, values)


def adaptive(request: EnvRequest) -> RebuiltEnv:
    """The one with a curriculum."""
    return RebuiltEnv(lambda count: AdaptiveToy(count, request.seed), request)


class HardCartPole(CartPole):
    """A cart pole that ends every episode at once where its curriculum says ``hard``; it can be drawn."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed=seed, dtype=dtype)
        self.curriculum = {"hard": torch.zeros(1, dtype=torch.float64)}

    def advance(self, figures: Mapping[str, float]) -> None:
        self.curriculum["hard"].fill_(1.0)

    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        hard = torch.full_like(result.terminated, self.curriculum["hard"].item() > 0)
        return replace(result, terminated=result.terminated | hard)


def hard_cartpole(request: EnvRequest) -> HardCartPole:
    """The one that can be drawn."""
    return HardCartPole(request.seed, request.dtype)


def restarted(request: EnvRequest) -> RebuiltEnv:
    """One that only a new process can make larger."""
    can = replace(CAPABILITIES, resize="restart")
    return RebuiltEnv(lambda count: Toy(count, request.seed, can), request)


def make(request: EnvRequest) -> RebuiltEnv:
    """The toy as a backend, for ``env.backend``. Overrides: builds wait while ``gate``, a file, is there;
    one of more than ``memory_envs`` runs out of memory."""
    gate = Path(str(request.overrides.get("gate", "/nowhere")))
    most = int(request.overrides.get("memory_envs", 10**6))

    def build(count: int) -> Toy:
        request.on_stage("building the toy")
        deadline_s = time.monotonic() + 100
        while gate.exists():
            assert time.monotonic() < deadline_s, f"nobody opens {gate}"
            time.sleep(0.01)
        if count > most:
            raise torch.OutOfMemoryError(f"no room for {count} envs")
        request.on_stage("")
        return Toy(count, request.seed)

    return RebuiltEnv(build, request)
