"""The update of one iteration: E epochs of M mini-batches on the rollouts of all ranks.

Every loss is a sum over samples, divided by the count over all ranks. So W ranks, with whatever
shares of the envs, step like one process on the union. How sums over ranks are made is a `Reduction`
(`rallypoint.trainer.ordered`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config, DistillSection, PpoSection
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.epochstats import EpochStatistics
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.figures import SAMPLE_FIGURES, Measured
from rallypoint.trainer.gae import compute_gae, with_final_values
from rallypoint.trainer.kl import gaussian_kl, next_learning_rate
from rallypoint.trainer.latent import TERMS, coefficients, populations
from rallypoint.trainer.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    gaussian_entropy,
    gaussian_log_prob,
    squared_value_loss,
)
from rallypoint.trainer.minibatches import MiniBatch, MiniBatches
from rallypoint.trainer.networks import ActorCritic
from rallypoint.trainer.normaliser import Normaliser
from rallypoint.trainer.optimiser import Adam
from rallypoint.trainer.ordered import BlockReduction, RankReduction, Reduction
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.statistics import Moments, standardise

_KL, _ENTROPY = SAMPLE_FIGURES.index("kl"), SAMPLE_FIGURES.index("entropy")
_NORM_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as torch does."""


class PpoUpdate:
    """Runs updates of one policy with one optimiser."""

    def __init__(
        self, policy: ActorCritic, optimiser: Adam, normaliser: Normaliser, config: Config
    ) -> None:
        self._policy = policy
        self._optimiser = optimiser
        self._normaliser = normaliser
        self._config = config.ppo
        self._distill = config.distill
        self._seed = config.job.seed
        self._aux = config.aux
        self.extra_figures: tuple[str, ...] = ()
        if config.distill.teacher is not None:
            self.extra_figures = ("aux_distill",)
        elif config.aux.latent is not None:
            self.extra_figures = TERMS
        """Loss terms beside PPO's, as `figures.Layout.extra` names them."""
        actor, critic = policy.clip_groups()
        joint = self._config.grad_clip == "joint"
        self._clip_groups = [[*actor, *critic]] if joint else [actor, critic]

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
        reduction: Reduction = (
            BlockReduction(collectives, self._policy, rollout.blocks)
            if self._config.reduction == "ordered"
            else RankReduction(collectives, module)
        )
        parts = reduction.shards(rollout)
        found = [advantages_of(part, self._config) for part in parts]
        collectives.hit("gae")
        zeros = torch.zeros(len(SAMPLE_FIGURES) + 2 * len(self.extra_figures), dtype=torch.float64)
        measured = [Measured(zeros, advantages=Moments.of(x.flatten())) for x, _ in found]
        shards = self._samples(reduction, parts, found, [m.advantages for m in measured])
        statistics = self._statistics(collectives, reduction, shards, iteration)
        weights = self._weights(collectives, reduction, shards, iteration)
        for epoch in range(self._config.epochs):
            epochs = [shard.epoch(iteration, epoch) for shard in shards]
            for dealt in zip(*epochs, strict=True):
                batches = dealt if statistics is None else statistics.advance(dealt)
                terms = next(weights)
                if self._step(batches, rollout.std, collectives, reduction, measured, terms):
                    on_optimiser_step()
                collectives.hit("between_steps")
        return reduction, measured

    def _statistics(
        self,
        collectives: Collectives,
        reduction: Reduction,
        shards: Sequence[MiniBatches],
        iteration: int,
    ) -> EpochStatistics | None:
        if self._config.normaliser_update == "iteration":
            return None
        collectives.hit("epoch_moments")
        epochs = self._config.epochs
        return EpochStatistics(
            self._normaliser, reduction, shards, iteration=iteration, epochs=epochs
        )

    def _weights(
        self,
        collectives: Collectives,
        reduction: Reduction,
        shards: Sequence[MiniBatches],
        iteration: int,
    ) -> Iterator[Sequence[float] | None]:
        """Weights of the auxiliary terms' sums in each mini-batch. The loss is divided by the count of
        all samples; a term is a mean over its own population, whose count over all ranks is known
        beforehand: one collective for the whole iteration."""
        if self._aux.latent is None:
            yield from itertools.repeat(None)
        local = [shard.populations(iteration, self._config.epochs) for shard in shards]
        collectives.hit("aux_counts")
        counts = reduction.begin_sum("aux_counts", local)().view(-1, 2).tolist()
        for samples, privileged in counts:
            sizes = (samples - privileged, privileged, privileged)
            yield [
                self._aux.scale * coefficient * samples / size if size else 0.0
                for coefficient, size in zip(coefficients(self._aux), sizes, strict=True)
            ]

    def _samples(
        self,
        reduction: Reduction,
        shards: Sequence[Rollout],
        found: Sequence[tuple[Tensor, Tensor]],
        local: Sequence[Moments],
    ) -> list[MiniBatches]:
        """Per shard, the samples with advantages (of these moments) and returns; standardised unless
        each mini-batch does it."""
        ppo = self._config
        if ppo.advantage_scope == "global":
            vectors = reduction.gather("advantage_moments", [m.to_vector() for m in local])
            merged = functools.reduce(Moments.merge, map(Moments.from_vector, vectors))
            local = [merged] * len(local)
        return [
            MiniBatches(
                shard,
                advantages
                if ppo.advantage_scope == "mini_batch"
                else standardise(advantages, moments, ddof=ppo.advantage_ddof),
                returns,
                ppo,
                self._seed,
            )
            for shard, moments, (advantages, returns) in zip(shards, local, found, strict=True)
        ]

    def _step(
        self,
        batches: Sequence[MiniBatch],
        std_old: Tensor,
        collectives: Collectives,
        reduction: Reduction,
        measured: Sequence[Measured],
        weights: Sequence[float] | None,
    ) -> bool:
        """One mini-batch, which has a part in every shard. False when no step was taken, on any rank,
        because a loss or the gradient was not finite in some shard (or none had a sample)."""
        ppo = self._config
        self._optimiser.clear_gradients()
        zeros = [measure.sample_sums.new_zeros(measure.sample_sums.shape) for measure in measured]
        passes = _Passes(reduction.module, std_old, ppo, self._distill, zeros, weights)
        *earlier, last = zip(*(batch.split(ppo.micro_batches) for batch in batches), strict=True)
        for parts in earlier:
            reduction.accumulate(functools.partial(passes.forward, parts))
        losses = passes.forward(last)
        sums = passes.sums
        samples = [batch.returns.numel() for batch in batches]
        shared = [
            # The loss is made of the sums.
            torch.tensor([x[_KL].item(), n, not x.isfinite().all()], dtype=torch.float64).to(
                x.device
            )
            for x, n in zip(sums, samples, strict=True)
        ]
        collectives.hit("mini_batch")
        reduced = reduction.begin_sum("mini_batch", shared)  # beside the backward pass
        collectives.hit("backward_begin")
        # Always, so that every rank takes part in the reduction of gradients.
        reduction.backward(losses)
        collectives.hit("backward_end")
        kl_sum, count, not_finite = reduced().tolist()
        norm = self._scale_and_clip(1.0 / max(count, 1.0))
        if not_finite or not count or not math.isfinite(norm):
            for shard in measured:
                shard.skipped_steps += 1
            return False
        if ppo.desired_kl is not None:
            self._adapt(kl_sum / count, ppo.desired_kl, collectives.world_size)
        self._optimiser.step()
        self._policy.clamp_std()
        for shard, figures, n in zip(measured, sums, samples, strict=True):
            shard.add(figures, n, norm)
        return True

    def _adapt(self, kl: float, target: float, world_size: int) -> None:
        """Follow the KL, which is the same float64 on every rank."""
        bounds = self._config.learning_rate_bounds
        rate = next_learning_rate(self._optimiser.learning_rate, kl, target=target, bounds=bounds)
        if self._config.learning_rate_decision == "rank_0" and world_size > 1:
            rate = torch.tensor(rate, dtype=torch.float32).item()  # as it would be sent
        self._optimiser.learning_rate = rate

    def _scale_and_clip(self, scale: float) -> float:
        """Multiply the gradient, which is the same on every rank, by ``scale``, then clip it: once, and
        in one pass. Its norm between the two."""
        limit = self._config.max_grad_norm
        norms = []
        for group in self._clip_groups:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            parts = torch.stack(torch._foreach_norm(gradients))
            norm = torch.linalg.vector_norm(parts).item() * scale
            clipped = 1.0 if limit is None else min(1.0, limit / (norm + _NORM_EPS))
            torch._foreach_mul_(gradients, scale * clipped)
            norms.append(norm)
        return math.hypot(*norms)


def advantages_of(rollout: Rollout, ppo: PpoSection) -> tuple[Tensor, Tensor]:
    """Advantages, not standardised, and returns of a rollout, ``[T, N]`` each."""
    flags = rollout.terminated, rollout.truncated
    rewards, values, gamma = rollout.rewards, rollout.values, ppo.gamma
    if rollout.final_values is not None:
        rewards = with_final_values(rewards, values, rollout.final_values, *flags, gamma=gamma)
    return compute_gae(rewards, values, rollout.last_values, *flags, gamma=gamma, lam=ppo.lam)


class _Passes:
    """Forward passes of one mini-batch, and the sums of figures over them."""

    def __init__(
        self,
        module: nn.Module,
        std_old: Tensor,
        ppo: PpoSection,
        distill: DistillSection,
        zeros: Sequence[Tensor],
        weights: Sequence[float] | None,
    ) -> None:
        self._weights = weights
        self._module = module
        self._std_old = std_old
        self._ppo = ppo
        self._distill = distill
        self.sums = [x.to(std_old.device) for x in zeros]
        """Per shard, in the order of `Measured.sample_sums`."""

    def forward(self, batches: Sequence[MiniBatch]) -> list[Tensor]:
        """The loss of each shard's part, summed over samples."""
        results = [
            _losses(batch, self._std_old, self._module, self._ppo)
            if batch.label is None and self._weights is None
            else _latent_losses(batch, self._std_old, self._module, self._ppo, self._weights)
            if self._weights is not None
            else _student_losses(batch, self._std_old, self._module, self._ppo, self._distill)
            for batch in batches
        ]
        self.sums = [total + added for total, (_, added) in zip(self.sums, results, strict=True)]
        return [loss for loss, _ in results]


def _losses(
    batch: MiniBatch, std_old: Tensor, module: nn.Module, ppo: PpoSection
) -> tuple[Tensor, Tensor]:
    """The loss summed over samples, and the sums of `SAMPLE_FIGURES` (float64, no graph)."""
    return _ppo_losses(batch, std_old, module(batch.actor_obs, batch.critic_obs), ppo)


def _student_losses(
    batch: MiniBatch, std_old: Tensor, module: nn.Module, ppo: PpoSection, distill: DistillSection
) -> tuple[Tensor, Tensor]:
    """As `_losses`, with a teacher's labels; its term's sum is the last one."""
    outputs = module(batch.actor_obs, batch.critic_obs)
    mean, std, value = outputs
    imitation = (mean - batch.label).square().sum()
    if distill.ppo_coef:
        loss, sums = _ppo_losses(batch, std_old, outputs, ppo)
        loss = distill.ppo_coef * loss + distill.coef * imitation
    else:
        # Every parameter stays in the graph, or DDP would wait for the gradients of the others.
        loss = distill.coef * imitation + 0.0 * (value.sum() + std.sum())
        sums = torch.zeros(len(SAMPLE_FIGURES), dtype=torch.float64, device=mean.device)
        with torch.no_grad():
            kl = gaussian_kl(batch.mean_old, std_old, mean, std, form=ppo.kl_form)
            sums[_KL] = kl.sum(dtype=torch.float64)
            sums[_ENTROPY] = gaussian_entropy(std).double() * batch.returns.numel()
    pair = torch.stack([imitation.detach().double(), torch.tensor(float(len(mean)))])
    return loss, torch.cat([sums, pair.to(sums)])


def _latent_losses(
    batch: MiniBatch, std_old: Tensor, module: nn.Module, ppo: PpoSection, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """As `_losses`, with the auxiliary terms, each summed over its population times its weight; their
    sums and counts come last."""
    if batch.privileged is None:
        raise TrainerError("the rollout does not say where the privileged encoder drove")
    *outputs, terms = module(batch.actor_obs, batch.critic_obs, batch.privileged)
    loss, sums = _ppo_losses(batch, std_old, (outputs[0], outputs[1], outputs[2]), ppo)
    masks = populations(batch.privileged)
    of_terms = torch.where(masks, terms, 0.0).sum(0)
    loss = loss + (of_terms * of_terms.new_tensor(weights)).sum()
    pairs = torch.stack([of_terms.detach().double(), masks.sum(0).double()], -1)
    return loss, torch.cat([sums, pairs.flatten()])


def _ppo_losses(
    batch: MiniBatch,
    std_old: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    ppo: PpoSection,
) -> tuple[Tensor, Tensor]:
    mean, std, value = outputs
    ratio = (gaussian_log_prob(batch.actions, mean, std) - batch.log_prob_old).exp()
    policy_loss = clipped_policy_loss(ratio, batch.advantage, clip=ppo.clip, reduction="sum")
    if ppo.value_loss == "clipped":
        value_loss = clipped_value_loss(
            value, batch.value_old, batch.returns, clip=ppo.clip, reduction="sum"
        )
    else:
        value_loss = squared_value_loss(value, batch.returns, reduction="sum")
    entropy = gaussian_entropy(std) * batch.returns.numel()
    loss = policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * entropy
    with torch.no_grad():
        kl = gaussian_kl(batch.mean_old, std_old, mean, std, form=ppo.kl_form)
        ratio = ratio.to(torch.float64)
        figures = (
            *(policy_loss, value_loss, entropy, kl.sum(dtype=torch.float64)),
            ((ratio - 1.0).abs() > ppo.clip).sum(),
            loss,
            ((value - batch.value_old).abs() > ppo.clip).sum(),
            ratio.sum(),
            ratio.square().sum(),
        )
        return loss, torch.stack([x.detach().to(torch.float64) for x in figures])
