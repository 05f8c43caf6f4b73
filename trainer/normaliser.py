"""Observation normalisation by one global running statistic per observation group.

The statistics are frozen within an iteration and merged once at its end, from per-rank deltas: no
sample is counted twice, whatever the world size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rallypoint.trainer.statistics import Moments

CLIP = 5.0
"""Normalised observations are clamped to this many standard deviations."""
EPS = 1e-5
"""Added to the variance."""


@dataclass(frozen=True)
class Scaling:
    """Frozen statistics, in the dtype of the observations."""

    by_group: Mapping[str, tuple[Tensor, Tensor]]
    """Mean and inverse standard deviation, ``[D]`` each; a group that is not here stays raw."""

    def apply(self, group: str, obs: Tensor) -> Tensor:
        """Normalised observations ``[..., D]``."""
        if group not in self.by_group:
            return obs
        mean, inverse_std = self.by_group[group]
        return ((obs - mean) * inverse_std).clamp_(-CLIP, CLIP)


class Normaliser:
    """Global count, mean and m2 per observation group, as live tensors; identity until the second
    sample. With no groups it leaves every observation raw."""

    def __init__(self, dims: Mapping[str, int], device: torch.device) -> None:
        self.groups = tuple(sorted(dims))
        self._tensors: dict[str, Tensor] = {}
        for group in self.groups:
            zeros = torch.zeros(dims[group], dtype=torch.float64, device=device)
            self._tensors[f"{group}/count"] = torch.zeros((), dtype=torch.int64, device=device)
            self._tensors[f"{group}/mean"] = zeros
            self._tensors[f"{group}/m2"] = zeros.clone()

    def tensors(self) -> Mapping[str, Tensor]:
        """Live state: ``<group>/count`` (int64), ``<group>/mean`` and ``<group>/m2`` (float64)."""
        return self._tensors

    def moments(self, group: str) -> Moments:
        """The global statistic of a group."""
        count, mean, m2 = (self._tensors[f"{group}/{part}"] for part in ("count", "mean", "m2"))
        return Moments(int(count), mean, m2)

    def merge(self, group: str, delta: Moments) -> None:
        """Add samples to the global statistic, in place."""
        merged = self.moments(group).merge(delta)
        self._tensors[f"{group}/count"].fill_(merged.count)
        self._tensors[f"{group}/mean"].copy_(merged.mean)
        self._tensors[f"{group}/m2"].copy_(merged.m2)

    def scaling(self, dtype: torch.dtype) -> Scaling:
        """The statistics as they are now, for a whole iteration."""
        return Scaling({group: self._scale(group, dtype) for group in self.groups})

    def _scale(self, group: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        moments = self.moments(group)
        if moments.count < 2:
            return torch.zeros_like(moments.mean, dtype=dtype), torch.ones_like(
                moments.mean, dtype=dtype
            )
        inverse_std = (moments.variance(ddof=0) + EPS).rsqrt()
        return moments.mean.to(dtype), inverse_std.to(dtype)
