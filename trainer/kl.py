"""Divergence of the policy from the one that collected, and the learning rate that follows it."""

from typing import Literal

from torch import Tensor

SONIC_OFFSET = 1e-5
"""What SONIC adds to the ratio of standard deviations inside the logarithm."""
FACTOR = 1.5
"""The adaptive rule multiplies or divides the learning rate by this."""


def gaussian_kl(
    mu_old: Tensor,
    sigma_old: Tensor,
    mu: Tensor,
    sigma: Tensor,
    *,
    form: Literal["exact", "sonic"] = "exact",
) -> Tensor:
    """KL(old || new) of diagonal normal distributions, summed over action dims: ``[...]`` for means
    ``[..., A]`` and standard deviations that broadcast to them.

    The ``exact`` form is exactly 0 for identical policies, because it takes the logarithm of the
    ratio and not a difference of logarithms: the sign of what is left over would move the learning
    rate. The ``sonic`` form adds 1e-5 to the ratio, and so is A * log(1 + 1e-5) there.
    """
    ratio = sigma / sigma_old
    if form == "sonic":
        ratio = ratio + SONIC_OFFSET
    moved = (sigma_old.square() + (mu_old - mu).square()) / (2.0 * sigma.square())
    return (ratio.log() + (moved - 0.5)).sum(-1)


def next_learning_rate(
    lr: float, kl: float, *, target: float, bounds: tuple[float, float]
) -> float:
    """The learning rate after a mini-batch with this mean KL: divided by 1.5 above twice the target,
    multiplied by 1.5 between 0 and half the target, within ``bounds``; else, and for NaN, as it was.
    All comparisons are strict."""
    low, high = bounds
    if kl > 2.0 * target:
        return max(lr / FACTOR, low)
    if 0.0 < kl < target / 2.0:
        return min(lr * FACTOR, high)
    return lr
