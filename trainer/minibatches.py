"""The samples of a rollout, and how they are dealt into mini-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.rng import permutation
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.statistics import Moments, standardise


@dataclass(frozen=True)
class MiniBatch:
    """B samples: whole trajectories of some envs, or single transitions."""

    actor_obs: Tensor
    """``[B, D]``."""
    critic_obs: Tensor
    """``[B, D]``; the same tensor as ``actor_obs`` where both see the same."""
    actions: Tensor
    """``[B, A]``."""
    mean_old: Tensor
    """``[B, A]``."""
    log_prob_old: Tensor
    """``[B]``."""
    value_old: Tensor
    """``[B]``."""
    advantage: Tensor
    """Standardised, ``[B]``."""
    returns: Tensor
    """``[B]``."""
    label: Tensor | None = None
    """Action means of a teacher, ``[B, A]``."""
    privileged: Tensor | None = None
    """Where the privileged encoder drove the policy, ``[B]`` bool."""

    def split(self, count: int) -> list["MiniBatch"]:
        """``count`` micro-batches, in order; empty ones of an empty mini-batch."""
        if count == 1:
            return [self]
        names = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        parts = zip(*(getattr(self, name).tensor_split(count) for name in names), strict=True)
        batches = [MiniBatch(**dict(zip(names, part, strict=True))) for part in parts]
        if self.critic_obs is self.actor_obs:
            batches = [replace(batch, critic_obs=batch.actor_obs) for batch in batches]
        return batches


class MiniBatches:
    """The samples of one rank's rollout, from which `epoch` deals mini-batches. Observations are raw
    where the rollout has them so.

    A *row* is what is shuffled: the trajectory of an env, or one transition. Rows are numbered by env
    block, so that a block's permutation is the same wherever the block is.
    """

    def __init__(
        self, rollout: Rollout, advantages: Tensor, returns: Tensor, config: PpoSection, seed: int
    ) -> None:
        self._config = config
        self._seed = seed
        self._blocks = np.array(rollout.blocks, dtype=np.int64)
        self._steps = 1 if config.mini_batch_of == "trajectories" else len(rollout.rewards)
        self._block_rows = rollout.block * self._steps
        actor_obs, critic_obs = rollout.actor_obs, rollout.critic_obs
        if rollout.raw_actor_obs is not None:
            actor_obs = rollout.raw_actor_obs
            critic_obs = actor_obs if rollout.raw_critic_obs is None else rollout.raw_critic_obs
        self._actor_obs = self._rows(actor_obs)
        self._critic_obs = None if critic_obs is actor_obs else self._rows(critic_obs)
        self._labels = None if rollout.labels is None else self._rows(rollout.labels)
        driven = rollout.privileged
        self._privileged = None if driven is None else self._rows(driven)
        self._vectors = torch.stack([self._rows(x) for x in (rollout.actions, rollout.mean)])
        scalars = (rollout.log_prob, rollout.values, advantages, returns)
        self._scalars = torch.stack([self._rows(x) for x in scalars])

    def epoch(self, iteration: int, epoch: int) -> Iterator[MiniBatch]:
        """M mini-batches that together hold every row once. With a permutation per block each env block
        gives the same number of rows to each, and nothing but the seed, the iteration, the epoch and
        the block decides which."""
        for rows in self._dealt(iteration, epoch):
            yield self._take(torch.from_numpy(rows).to(self._actor_obs.device))

    def populations(self, iteration: int, epochs: int) -> Tensor:
        """Of each mini-batch of the iteration, float64 ``[2 * E * M]``: samples, and those of them in
        which the privileged encoder drove, alternately."""
        if self._privileged is None:
            raise TrainerError("the rollout does not say where the privileged encoder drove")
        by_row = self._privileged.sum(1).cpu().numpy()
        steps = self._privileged.shape[1]
        counts = [
            (steps * rows.size, by_row[rows].sum())
            for epoch in range(epochs)
            for rows in self._dealt(iteration, epoch)
        ]
        return torch.tensor(counts, dtype=torch.float64, device=self._actor_obs.device).flatten()

    def _dealt(self, iteration: int, epoch: int) -> NDArray[np.int64]:
        """Rows of each mini-batch ``[M, R]``."""
        draw = epoch if self._config.permutation_every == "epoch" else 0
        order = self._by_block if self._config.permutation_scope == "block" else self._by_rank
        return order(iteration, draw)

    def _by_block(self, iteration: int, draw: int) -> NDArray[np.int64]:
        """Rows of each mini-batch ``[M, R]``: block by block within each micro-batch."""
        size, count, parts = self._block_rows, self._config.mini_batches, self._config.micro_batches
        order = permutation(self._seed, self._blocks, iteration, draw, size)
        rows = order + size * np.arange(len(self._blocks))[:, None]
        dealt = rows.reshape(len(self._blocks), count, parts, size // (count * parts))
        return np.ascontiguousarray(dealt.transpose(1, 2, 0, 3)).reshape(count, -1)

    def _by_rank(self, iteration: int, draw: int) -> NDArray[np.int64]:
        """Rows of each mini-batch ``[M, R]``; a remainder goes to none. The lowest block stands for the
        rank: it stays when ranks are renumbered."""
        total, count = self._block_rows * len(self._blocks), self._config.mini_batches
        if not total:
            return np.zeros((count, 0), dtype=np.int64)
        order = permutation(self._seed, self._blocks[0], iteration, draw, total)
        return order[: total // count * count].reshape(count, -1)

    def _rows(self, x: Tensor) -> Tensor:
        """``[T, N, ...]`` as rows: ``[N, T, ...]`` of trajectories, ``[N * T, 1, ...]`` of transitions.
        Contiguous."""
        rows = x.transpose(0, 1).contiguous()
        return rows if self._steps == 1 else rows.reshape(-1, 1, *x.shape[2:])

    def _take(self, rows: Tensor) -> MiniBatch:
        actor_obs = self._actor_obs.index_select(0, rows).flatten(0, 1)
        critic_obs = (
            actor_obs
            if self._critic_obs is None
            else self._critic_obs.index_select(0, rows).flatten(0, 1)
        )
        actions, mean = self._vectors.index_select(1, rows).flatten(1, 2)
        log_prob, values, advantage, returns = self._scalars.index_select(1, rows).flatten(1, 2)
        if self._config.advantage_scope == "mini_batch":
            ddof = self._config.advantage_ddof
            advantage = standardise(advantage, Moments.of(advantage), ddof=ddof)
        label = None
        if self._labels is not None:
            label = self._labels.index_select(0, rows).flatten(0, 1)
        driven = None
        if self._privileged is not None:
            driven = self._privileged.index_select(0, rows).flatten(0, 1)
        scalars = (log_prob, values, advantage, returns)
        return MiniBatch(actor_obs, critic_obs, actions, mean, *scalars, label, driven)
