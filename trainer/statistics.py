"""Moments that merge exactly: count, mean and sum of squared deviations, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """First and second moments of a set of samples.

    Merging is exact up to rounding in any order and grouping: Chan, Golub and LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    count: int
    mean: Tensor
    """Float64, the shape of one sample."""
    m2: Tensor
    """Sum of squared deviations from the mean; float64, the shape of one sample."""

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
        """Moments over dim 0 of ``x`` ``[K, …]``; no rows at all give the neutral element of
        `merge`."""
        count = x.shape[0]
        if count == 0:
            zeros = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
            return cls(0, zeros, zeros.clone())
        # Deviations from the first row: exact for constant samples, and no cancellation for
        # samples far from zero.
        shifted = x.to(torch.float64) - x[0].to(torch.float64)
        offset = shifted.mean(0)
        m2 = (shifted - offset).square_().sum(0)
        return cls(count, x[0].to(torch.float64) + offset, m2)

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both sets together."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        between = difference.square() * (self.count * other.count / count)
        return Moments(count, mean, self.m2 + other.m2 + between)

    def variance(self, ddof: int) -> Tensor:
        """``m2 / (count - ddof)``; zeros, not NaN, when the count is ``ddof`` or less."""
        if self.count <= ddof:
            return torch.zeros_like(self.m2)
        return self.m2 / (self.count - ddof)

    def to_vector(self) -> Tensor:
        """``[1 + 2D]`` float64: count, mean, m2 (D values in a sample). Counts are exact below
        2^53."""
        count = torch.tensor([self.count], dtype=torch.float64, device=self.mean.device)
        return torch.cat([count, self.mean.reshape(-1), self.m2.reshape(-1)])

    @classmethod
    def from_vector(cls, vector: Tensor) -> "Moments":
        """What `to_vector` packed, with samples of shape ``[D]``."""
        size = (vector.numel() - 1) // 2
        return cls(int(vector[0]), vector[1 : 1 + size], vector[1 + size :])


def standardise(x: Tensor, moments: Moments, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / (std + eps)`` in the dtype of ``x``, with ``moments`` of one sample of ``x``
    (its shape is that of the trailing dims of ``x``)."""
    scale = moments.variance(ddof).sqrt() + eps
    return ((x - moments.mean) / scale).to(x.dtype)
