"""The learner's record in the last collective of an iteration, and the figures made from all of them.

A record is one float64 vector of fixed layout: the moments of each normalised observation group, then
a sum and a weight per figure. Every figure is a global sum over a global weight, so that an empty rank
changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rallypoint.trainer.episodes import ENDING
from rallypoint.trainer.losses import gaussian_entropy
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.statistics import Moments

SAMPLE_FIGURES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "kl",
    "clip_fraction",
    "ppo_loss",
    "value_clip_fraction",
    "ratio_mean",
    "ratio_square",
)
"""Means over the samples of all mini-batches whose step was taken."""
_NAMES = (
    "reward_mean",
    "episode_return_mean",
    "episode_length_mean",
    *SAMPLE_FIGURES,
    "gradient_norm",
    "skipped_steps",
    "rollout_entropy",
    "advantage_mean",
    "advantage_square",
)
PPO_FIGURES = {
    *("policy_loss", "value_loss", "clip_fraction", "ppo_loss", "value_clip_fraction"),
    *("ratio_mean", "ratio_var"),
}
"""What only PPO's loss gives a meaning."""
_SPREADS = {"ratio": ("ratio_var", 1.0), "advantage": ("advantage_std", 0.5)}
"""Mean and mean square become a figure of spread: its name, and the power of the variance."""


@dataclass
class Measured:
    """What an update measured on this rank."""

    sample_sums: Tensor = field(
        default_factory=lambda: torch.zeros(len(SAMPLE_FIGURES), dtype=torch.float64)
    )
    """Sums over this rank's samples, in the order of `SAMPLE_FIGURES`; then of `Layout.extra` each sum, and
    the count of samples in it."""
    samples: int = 0
    """Samples in them."""
    gradient_norm_sum: float = 0.0
    """Sum over optimiser steps of the norm of the global gradient before clipping."""
    steps: int = 0
    """Optimiser steps taken."""
    skipped_steps: int = 0
    """Mini-batches without a step because something was not finite on some rank."""
    advantages: Moments = field(default_factory=lambda: Moments.of(torch.zeros(0)))
    """Of the advantages before they were standardised."""

    def add(self, sample_sums: Tensor, samples: int, gradient_norm: float) -> None:
        """A mini-batch whose step was taken."""
        self.sample_sums = self.sample_sums + sample_sums.cpu()
        self.samples += samples
        self.gradient_norm_sum += gradient_norm
        self.steps += 1


@dataclass(frozen=True)
class Layout:
    """Where things are in a record; the same on every rank."""

    obs_dims: Mapping[str, int]
    """Normalised observation groups."""
    env_figures: Sequence[str]
    """Figures of the env, sorted."""
    bins: int = 0
    """Bins of the motion library; 0 for tasks without one."""
    reward_terms: Sequence[str] = ()
    """Terms of the env's reward, in its order, and what is known of episodes as they end."""
    extra: Sequence[str] = ()
    """Loss terms beside PPO's: means over the samples that each is about."""

    @property
    def names(self) -> tuple[str, ...]:
        """All figures, in the order of the record."""
        env_figures = (f"figure/{name}" for name in self.env_figures)
        terms = (
            f"episode/{name.removeprefix(ENDING)}"
            if name.startswith(ENDING)
            else f"episode/rew_{name}"
            for name in self.reward_terms
        )
        return (*_NAMES, *env_figures, *terms, *self.extra)


def pack(layout: Layout, rollout: Rollout, measured: Measured) -> Tensor:
    """This rank's record, float64 ``[R]``."""
    moments = [rollout.obs_moments[g].to_vector() for g in sorted(layout.obs_dims)]
    pairs = [*_pairs(rollout, measured)]
    pairs += [
        (rollout.figures[name].sum().item(), rollout.env_steps) for name in layout.env_figures
    ]
    episodes = len(rollout.episode_returns)
    pairs += [(rollout.episode_terms[name].sum().item(), episodes) for name in layout.reward_terms]
    extra = measured.sample_sums.tolist()[len(SAMPLE_FIGURES) :] or [0.0] * 2 * len(layout.extra)
    pairs += zip(extra[::2], extra[1::2], strict=True)
    figures = torch.tensor(pairs, dtype=torch.float64, device=rollout.rewards.device)
    return torch.cat([*moments, figures.flatten(), *_bin_counts(layout, rollout)])


def unpack(
    layout: Layout, records: Sequence[Tensor]
) -> tuple[dict[str, Moments], dict[str, float]]:
    """Moments per observation group and the global figures, merged in rank order. A figure that has
    no weight anywhere (no episode ended) is left out."""
    deltas: dict[str, Moments] = {}
    offset = 0
    for group in sorted(layout.obs_dims):
        end = offset + 1 + 2 * layout.obs_dims[group]
        delta = Moments.from_vector(records[0][offset:end])
        for record in records[1:]:
            delta = delta.merge(Moments.from_vector(record[offset:end]))
        deltas[group] = delta
        offset = end
    end = offset + 2 * len(layout.names)
    total = records[0][offset:end]
    for record in records[1:]:
        total = total + record[offset:end]
    pairs = total.view(-1, 2).tolist()
    means = {
        name: value / weight
        for name, (value, weight) in zip(layout.names, pairs, strict=True)
        if weight
    }
    return deltas, _with_spreads(means)


def unpack_bins(layout: Layout, records: Sequence[Tensor]) -> Tensor:
    """Failures and env steps by bin of the motion library over all ranks, ``[2, B]``; whole numbers."""
    total = sum(record[record.numel() - 2 * layout.bins :] for record in records[1:])
    first = records[0]
    return (first[first.numel() - 2 * layout.bins :] + total).view(2, layout.bins)


def _bin_counts(layout: Layout, rollout: Rollout) -> list[Tensor]:
    """Failures and env steps by bin. A failure is one of the bin that it happened in."""
    if rollout.bins is None:
        return []
    device = rollout.rewards.device
    seen = (rollout.bins[rollout.terminated.cpu()], rollout.bins.flatten())
    return [torch.bincount(bins, minlength=layout.bins).to(device, torch.float64) for bins in seen]


def _pairs(rollout: Rollout, measured: Measured) -> list[tuple[float, float]]:
    """(sum, weight) of each figure, in the order of ``_NAMES``."""
    episodes = len(rollout.episode_returns)
    advantages, count = measured.advantages, int(measured.advantages.count)
    return [
        (rollout.rewards.sum(dtype=torch.float64).item(), rollout.env_steps),
        (rollout.episode_returns.sum().item(), episodes),
        (rollout.episode_lengths.sum().item(), episodes),
        *((x, measured.samples) for x in measured.sample_sums.tolist()[: len(SAMPLE_FIGURES)]),
        (measured.gradient_norm_sum, measured.steps),
        (measured.skipped_steps, 1),
        (gaussian_entropy(rollout.std).item() * rollout.env_steps, rollout.env_steps),
        (advantages.mean.item() * count, count),
        (advantages.m2.item() + count * advantages.mean.item() ** 2, count),
    ]


def _with_spreads(means: dict[str, float]) -> dict[str, float]:
    for name, (spread, power) in _SPREADS.items():
        square = means.pop(f"{name}_square", None)
        if square is not None:
            means[spread] = max(0.0, square - means[f"{name}_mean"] ** 2) ** power
    return means
