"""The update of one iteration: E epochs of M mini-batches on the rollouts of all ranks.

Every loss is a sum over samples, divided by the count over all ranks. So W ranks, with whatever
shares of the envs, step like one process on the union. How sums over ranks are made is a `Reduction`
(`rallypoint.trainer.ordered`).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.figures import SAMPLE_FIGURES, Measured
from rallypoint.trainer.gae import compute_gae
from rallypoint.trainer.kl import gaussian_kl, next_learning_rate
from rallypoint.trainer.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    gaussian_entropy,
    gaussian_log_prob,
)
from rallypoint.trainer.networks import ActorCritic
from rallypoint.trainer.optimiser import Adam
from rallypoint.trainer.ordered import BlockReduction, RankReduction, Reduction
from rallypoint.trainer.rng import permutation
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.statistics import Moments, standardise

_KL = SAMPLE_FIGURES.index("kl")


@dataclass(frozen=True)
class MiniBatch:
    """B samples: whole trajectories of some envs."""

    actor_obs: Tensor
    """``[B, D]``."""
    critic_obs: Tensor
    """``[B, D]``; the same tensor as ``actor_obs`` where both see the same group."""
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


class MiniBatches:
    """The samples of a rollout, one row per env, from which mini-batches of rows are taken."""

    def __init__(self, rollout: Rollout, advantages: Tensor, returns: Tensor) -> None:
        self._blocks = rollout.blocks
        self._block = rollout.block
        same = rollout.critic_obs is rollout.actor_obs
        self._actor_obs = _rows(rollout.actor_obs)
        self._critic_obs = None if same else _rows(rollout.critic_obs)
        self._vectors = torch.stack([_rows(rollout.actions), _rows(rollout.mean)])
        scalars = (rollout.log_prob, rollout.values, advantages, returns)
        self._scalars = torch.stack([_rows(x) for x in scalars])

    def epoch(self, seed: int, iteration: int, epoch: int, count: int) -> Iterator[MiniBatch]:
        """``count`` mini-batches that together hold every env once. Each env block gives the same
        number of envs to each, by a permutation that nothing but the arguments and the block
        decides."""
        size = self._block
        blocks = np.array(self._blocks, dtype=np.int64)
        order = permutation(seed, blocks, iteration, epoch, size)
        rows = order + size * np.arange(len(blocks))[:, None]
        for part in rows.reshape(len(blocks), count, size // count).transpose(1, 0, 2):
            yield self._take(torch.from_numpy(part.flatten()).to(self._actor_obs.device))

    def _take(self, rows: Tensor) -> MiniBatch:
        actor_obs = self._actor_obs.index_select(0, rows).flatten(0, 1)
        critic_obs = (
            actor_obs
            if self._critic_obs is None
            else self._critic_obs.index_select(0, rows).flatten(0, 1)
        )
        actions, mean = self._vectors.index_select(1, rows).flatten(1, 2)
        log_prob, values, advantage, returns = self._scalars.index_select(1, rows).flatten(1, 2)
        return MiniBatch(actor_obs, critic_obs, actions, mean, log_prob, values, advantage, returns)


class PpoUpdate:
    """Runs updates of one policy with one optimiser."""

    def __init__(self, policy: ActorCritic, optimiser: Adam, config: PpoSection, seed: int) -> None:
        self._policy = policy
        self._optimiser = optimiser
        self._config = config
        self._seed = seed

    def run(
        self,
        rollout: Rollout,
        collectives: Collectives,
        module: nn.Module,
        iteration: int,
        on_optimiser_step: Callable[[], None],
    ) -> tuple[Reduction, Sequence[Measured]]:
        """E * M optimiser steps; ``module`` is the policy as `Collectives.replicated` wraps it.
        How it reduced, and what it measured on each shard.

        May be broken off by `GroupBroken` anywhere, and be run again after the state has been put
        back: it keeps nothing between runs."""
        ppo = self._config
        reduction: Reduction = (
            BlockReduction(collectives, self._policy, rollout.blocks)
            if ppo.reduction == "ordered"
            else RankReduction(collectives, module)
        )
        shards = self._samples(reduction, reduction.shards(rollout), collectives)
        measured = [Measured() for _ in shards]
        for epoch in range(ppo.epochs):
            epochs = [s.epoch(self._seed, iteration, epoch, ppo.mini_batches) for s in shards]
            for batches in zip(*epochs, strict=True):
                if self._step(batches, rollout.std, collectives, reduction, measured):
                    on_optimiser_step()
                collectives.hit("between_steps")
        return reduction, measured

    def _samples(
        self, reduction: Reduction, shards: Sequence[Rollout], collectives: Collectives
    ) -> list[MiniBatches]:
        """Per shard, advantages, standardised over all ranks, and the samples with them."""
        found = [
            compute_gae(
                shard.rewards,
                shard.values,
                shard.last_values,
                shard.terminated,
                shard.truncated,
                gamma=self._config.gamma,
                lam=self._config.lam,
            )
            for shard in shards
        ]
        collectives.hit("gae")
        local = [Moments.of(advantages.flatten()).to_vector() for advantages, _ in found]
        vectors = reduction.gather("advantage_moments", local)
        moments = functools.reduce(Moments.merge, map(Moments.from_vector, vectors))
        return [
            MiniBatches(shard, standardise(advantages, moments), returns)
            for shard, (advantages, returns) in zip(shards, found, strict=True)
        ]

    def _step(
        self,
        batches: Sequence[MiniBatch],
        std_old: Tensor,
        collectives: Collectives,
        reduction: Reduction,
        measured: Sequence[Measured],
    ) -> bool:
        """One mini-batch, which has a part in every shard. False when no step was taken, on any rank,
        because a loss or the gradient was not finite in some shard (or none had a sample)."""
        ppo = self._config
        losses, sums = zip(
            *(_losses(b, std_old, reduction.module, ppo) for b in batches), strict=True
        )
        samples = [batch.returns.numel() for batch in batches]
        shared = [
            # The loss is made of the sums.
            torch.tensor([x[_KL].item(), n, not x.isfinite().all()], dtype=torch.float64).to(
                x.device
            )
            for x, n in zip(sums, samples, strict=True)
        ]
        kl_sum, count, not_finite = reduction.sum("mini_batch", shared).tolist()
        self._optimiser.clear_gradients()
        collectives.hit("backward_begin")
        # Always, so that every rank takes part in the reduction of gradients.
        reduction.backward(losses, 1.0 / max(count, 1.0))
        collectives.hit("backward_end")
        norm = self._clip()
        if not_finite or not count or not math.isfinite(norm):
            for shard in measured:
                shard.skipped_steps += 1
            return False
        if ppo.desired_kl is not None:
            self._optimiser.learning_rate = next_learning_rate(
                self._optimiser.learning_rate,
                kl_sum / count,
                target=ppo.desired_kl,
                bounds=ppo.learning_rate_bounds,
            )
        self._optimiser.step()
        self._policy.clamp_std()
        for shard, figures, n in zip(measured, sums, samples, strict=True):
            shard.add(figures, n, norm)
        return True

    def _clip(self) -> float:
        """Clip the gradient, which is the same on every rank, once; its norm before."""
        norm = nn.utils.get_total_norm(self._optimiser.gradients(), foreach=True)
        limit = self._config.max_grad_norm
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self._policy.parameters(), limit, norm, foreach=True)
        return norm.item()


def _losses(
    batch: MiniBatch, std_old: Tensor, module: nn.Module, ppo: PpoSection
) -> tuple[Tensor, Tensor]:
    """The loss summed over samples, and the sums of `SAMPLE_FIGURES` (float64, no graph)."""
    mean, std, value = module(batch.actor_obs, batch.critic_obs)
    ratio = (gaussian_log_prob(batch.actions, mean, std) - batch.log_prob_old).exp()
    policy_loss = clipped_policy_loss(ratio, batch.advantage, clip=ppo.clip, reduction="sum")
    value_loss = clipped_value_loss(
        value, batch.value_old, batch.returns, clip=ppo.clip, reduction="sum"
    )
    entropy = gaussian_entropy(std) * batch.returns.numel()
    loss = policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * entropy
    with torch.no_grad():
        kl = gaussian_kl(batch.mean_old, std_old, mean, std).sum(dtype=torch.float64)
        clipped = ((ratio - 1.0).abs() > ppo.clip).sum()
        figures = (policy_loss, value_loss, entropy, kl, clipped)
        return loss, torch.stack([x.detach().to(torch.float64) for x in figures])


def _rows(x: Tensor) -> Tensor:
    """``[T, N, ...]`` to ``[N, T, ...]``, contiguous: one row per env."""
    return x.transpose(0, 1).contiguous()
