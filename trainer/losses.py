"""Loss terms of PPO (Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7 and 9).

Each is a sum or a mean over samples. The trainer takes sums and divides by the global count, so that
uneven shares of ranks weigh what they should.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]
_LOG_2_PI = math.log(2.0 * math.pi)


def clipped_policy_loss(
    ratio: Tensor, advantage: Tensor, *, clip: float, reduction: Reduction = "mean"
) -> Tensor:
    """``max(-A r, -A clamp(r, 1-clip, 1+clip))`` over samples; ``ratio`` and ``advantage`` have one
    shape."""
    free = ratio * advantage
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return _reduce(-torch.minimum(free, clipped), reduction)


def clipped_value_loss(
    value: Tensor, value_old: Tensor, returns: Tensor, *, clip: float, reduction: Reduction = "mean"
) -> Tensor:
    """``max((V - R)^2, (V_clip - R)^2)`` over samples, without a factor 1/2, where V_clip stays
    within ``clip`` of the value that the rollout saw."""
    near = value_old + (value - value_old).clamp(-clip, clip)
    return _reduce(torch.maximum((value - returns).square(), (near - returns).square()), reduction)


def squared_value_loss(value: Tensor, returns: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """``(V - R)^2`` over samples, without a factor 1/2."""
    return _reduce((value - returns).square(), reduction)


def gaussian_log_prob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of actions ``[..., A]`` under a diagonal normal distribution, summed over A."""
    scaled = (actions - mean) / std
    return -0.5 * scaled.square().sum(-1) - (std.log() + 0.5 * _LOG_2_PI).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Differential entropy of a diagonal normal distribution, summed over the last dim."""
    return (std.log() + (0.5 + 0.5 * _LOG_2_PI)).sum(-1)


def _reduce(terms: Tensor, reduction: Reduction) -> Tensor:
    return terms.sum() if reduction == "sum" else terms.mean()
