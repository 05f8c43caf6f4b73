"""SONIC's way with observation statistics, for fidelity: they move within the epochs of an update.

Before each mini-batch the statistics take in its raw observations, and normalise them; so every sample
counts once per epoch, and the policy that is updated sees other numbers than the one that collected.
SONIC broadcasts rank 0's buffers and averages variances; here the moments of every mini-batch over all
ranks are merged exactly, and gathered at once before the first epoch: which sample is in which
mini-batch is known by then.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rallypoint.trainer.minibatches import MiniBatch, MiniBatches
from rallypoint.trainer.normaliser import Normaliser
from rallypoint.trainer.ordered import Reduction
from rallypoint.trainer.statistics import Moments


class EpochStatistics:
    """Merges the statistics of one update, mini-batch by mini-batch. The samples are raw."""

    def __init__(
        self,
        normaliser: Normaliser,
        reduction: Reduction,
        shards: Sequence[MiniBatches],
        *,
        iteration: int,
        epochs: int,
    ) -> None:
        self._normaliser = normaliser
        self._sizes = [1 + 2 * size for size in normaliser.dims.values()]
        local = [self._moments(shard, iteration, epochs) for shard in shards]
        gathered = reduction.gather("epoch_moments", [moments.flatten() for moments in local])
        rows = [vector.view(local[0].shape) for vector in gathered]
        self._merged = iter([self._merge([row[i] for row in rows]) for i in range(len(rows[0]))])

    def advance(self, batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Take in the next mini-batch, of all ranks; this rank's parts of it, normalised."""
        for group, delta in next(self._merged).items():
            self._normaliser.merge(group, delta)
        return [self._normalised(batch) for batch in batches]

    def _normalised(self, batch: MiniBatch) -> MiniBatch:
        scaling = self._normaliser.scaling(batch.actor_obs.dtype)
        actor_obs = scaling.apply("actor", batch.actor_obs)
        if batch.critic_obs is batch.actor_obs and scaling.alike:
            return replace(batch, actor_obs=actor_obs, critic_obs=actor_obs)
        return replace(
            batch, actor_obs=actor_obs, critic_obs=scaling.apply("critic", batch.critic_obs)
        )

    def _moments(self, shard: MiniBatches, iteration: int, epochs: int) -> Tensor:
        """Moments of every mini-batch of a shard, ``[E M, sizes]``."""
        batches = [batch for epoch in range(epochs) for batch in shard.epoch(iteration, epoch)]
        return torch.stack([torch.cat(self._of(batch)) for batch in batches])

    def _of(self, batch: MiniBatch) -> list[Tensor]:
        seen = {"actor": batch.actor_obs, "critic": batch.critic_obs}
        return [
            Moments.of(seen[self._normaliser.network_of(group)]).to_vector()
            for group in self._normaliser.dims
        ]

    def _merge(self, vectors: Sequence[Tensor]) -> dict[str, Moments]:
        """Moments of one mini-batch over all shards, by group."""
        parts = [torch.split(vector, self._sizes) for vector in vectors]
        columns = zip(*parts, strict=True)
        return {
            group: functools.reduce(Moments.merge, map(Moments.from_vector, column))
            for group, column in zip(self._normaliser.dims, columns, strict=True)
        }
