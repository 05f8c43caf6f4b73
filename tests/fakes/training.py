"""A small training loop over simulated ranks, for tests of the algorithm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config, EnvSection, PpoSection
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.elastic.envrows import register_curriculum
from rallypoint.trainer.elastic.registry import PackedState, StateRegistry
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.ppo import DTYPES, PpoLearner
from rallypoint.trainer.rollout import Rollout
from tests.fakes.collectives import LockStepGroup, LockStepRank

BLOCK = 8


def config(
    *, task: str = "pointmass", dtype: Literal["float32", "float64"] = "float64", **ppo: object
) -> Config:
    """A configuration with small nets; further keywords are keys of ``[ppo]``."""
    section = replace(PpoSection(dtype=dtype, hidden=(32, 32), entropy_coef=0.005), **ppo)  # type: ignore[arg-type]
    return Config(env=EnvSection(task=task, block=BLOCK), ppo=section)


@dataclass
class Worker:
    """One rank: learner, env, and what happened at each optimiser step."""

    learner: PpoLearner
    env: VecEnv
    registry: StateRegistry
    ppo: PpoSection
    module: nn.Module | None = None
    learning_rates: list[float] = field(default_factory=list)
    """After each optimiser step."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Figures of each iteration."""

    def live(self) -> dict[str, Tensor]:
        """All state, as live tensors."""
        return self.registry.shared()

    def packed(self) -> PackedState:
        """A copy of all state."""
        packed = PackedState(self.live())
        packed.fill_from(self.live())
        return packed

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put these tensors into the state, by name; others that they hold are none of its."""
        for name, tensor in self.live().items():
            if name in state:
                tensor.copy_(state[name])

    def collect(self, iteration: int) -> Rollout:
        return self.learner.collect(self.env, iteration, on_step=lambda t: None)

    def update(self, rollout: Rollout, collectives: Collectives, iteration: int) -> None:
        if self.module is None:
            self.module = collectives.replicated(self.learner.module)
        self.learner.update(rollout, collectives, self.module, iteration, self._on_optimiser_step)

    def finish(self, rollout: Rollout, collectives: Collectives) -> None:
        record = self.learner.pack(rollout)
        self.history.append(self.learner.merge(collectives.all_gather("last", record)))

    def _on_optimiser_step(self) -> None:
        self.learning_rates.append(self.live()["optimiser/learning_rate"].item())


def make_worker(config: Config, blocks: Sequence[int]) -> Worker:
    """A worker that owns these env blocks."""
    env = make_env(config, dtype=DTYPES[config.ppo.dtype])
    ids = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
    env.assign(np.array(ids, dtype=np.int64), iteration=0)
    learner = learner_type(config)(config, env.spec, torch.device("cpu"))
    learner.on_assign(env.env_ids)
    registry = StateRegistry()
    learner.register(registry)
    register_curriculum(registry, env)
    return Worker(learner, env, registry, config.ppo)


def train(
    config: Config,
    shards: Sequence[Sequence[int]],
    iterations: int,
    *,
    after: Callable[[int, LockStepRank, Worker], None] | None = None,
    state: Mapping[str, Tensor] | None = None,
    first: int = 1,
) -> list[Worker]:
    """One rank per shard of env blocks, all trained together from iteration ``first``, if need be in a
    given state; ``after(iteration, rank, worker)`` is called on every rank at each safe point."""
    workers = [make_worker(config, blocks) for blocks in shards]
    for worker in workers:
        worker.load(state or {})

    def work(rank: LockStepRank) -> None:
        worker = workers[rank.rank]
        for iteration in range(first, first + iterations):
            rollout = worker.collect(iteration)
            worker.update(rollout, rank, iteration)
            worker.finish(rollout, rank)
            if after is not None:
                after(iteration, rank, worker)

    LockStepGroup(len(shards)).run(work)
    return workers


def poisoned(rollout: Rollout, field: str) -> Rollout:
    """The rollout with one value of one env that is not a number."""
    values = getattr(rollout, field).clone()
    values[3, 2] = float("nan")
    return replace(rollout, **{field: values})


def largest_difference(a: Worker, b: Worker) -> float:
    """Over all state of two workers."""
    one, other = a.live(), b.live()
    assert one.keys() == other.keys()
    return max((one[n].double() - other[n].double()).abs().max().item() for n in one)
