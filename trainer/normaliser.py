"""Observation normalisation by one global running statistic per observation group.

The statistics are frozen within an iteration and merged once at its end, from per-rank deltas: no
sample is counted twice, whatever the world size. (`rallypoint.trainer.epochstats` has SONIC's way.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.networks import critic_group
from rallypoint.trainer.statistics import Moments

VARIANCE_EPS = 1e-5
"""Added to the variance in the form ``variance``."""
STD_EPS = 1e-2
"""Added to the standard deviation in the form ``std``."""


@dataclass(frozen=True)
class Scaling:
    """Frozen statistics, in the dtype of the observations."""

    by_network: Mapping[str, tuple[Tensor, Tensor]]
    """Mean and inverse scale, ``[D]`` each, of what ``actor`` and ``critic`` see; the observations of a
    network that is not here stay raw."""
    clip: float | None
    """Clamp of normalised observations."""
    groups: tuple[str, ...]
    """Observation groups that have a statistic."""

    @property
    def alike(self) -> bool:
        """Whether actor and critic scale alike what both see."""
        return self.by_network.get("actor") is self.by_network.get("critic")

    def apply(self, network: str, obs: Tensor) -> Tensor:
        """Normalised observations ``[..., D]``."""
        if network not in self.by_network:
            return obs
        mean, inverse_scale = self.by_network[network]
        scaled = (obs - mean) * inverse_scale
        return scaled if self.clip is None else scaled.clamp_(-self.clip, self.clip)


class Normaliser:
    """Global count, mean and m2 per observation group, as live tensors; mean 0 and variance 1 until the
    second sample. Groups that no normalised network sees have no statistic."""

    def __init__(
        self, obs_dims: Mapping[str, int], config: PpoSection, device: torch.device
    ) -> None:
        self._form = config.normaliser_form
        self._clip = config.normaliser_clip
        seen = {"actor": "actor", "critic": critic_group(obs_dims)}
        normalised = {"actor": config.normalise_actor, "critic": config.normalise_critic}
        self._networks = {network: seen[network] for network, on in normalised.items() if on}
        self.dims = {group: obs_dims[group] for group in sorted(set(self._networks.values()))}
        """Size of each observation group that has a statistic, by name, sorted."""
        self._tensors: dict[str, Tensor] = {}
        for group, size in self.dims.items():
            zeros = torch.zeros(size, dtype=torch.float64, device=device)
            count = torch.tensor(config.normaliser_prior, dtype=torch.int64, device=device)
            self._tensors[f"{group}/count"] = count
            self._tensors[f"{group}/mean"] = zeros
            self._tensors[f"{group}/m2"] = torch.full_like(zeros, config.normaliser_prior)

    def network_of(self, group: str) -> str:
        """A network that sees a group of `dims` normalised: ``actor`` or ``critic``."""
        return next(network for network, seen in self._networks.items() if seen == group)

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
        groups = {group: self._scale(group, dtype) for group in self.dims}
        by_network = {network: groups[group] for network, group in self._networks.items()}
        return Scaling(by_network, self._clip, tuple(groups))

    def _scale(self, group: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        moments = self.moments(group)
        known = moments.count >= 2
        mean = moments.mean if known else torch.zeros_like(moments.mean)
        variance = moments.variance(ddof=0) if known else torch.ones_like(moments.mean)
        if self._form == "variance":
            inverse_scale = (variance + VARIANCE_EPS).rsqrt()
        else:
            inverse_scale = (variance.sqrt() + STD_EPS).reciprocal()
        return mean.to(dtype), inverse_scale.to(dtype)
