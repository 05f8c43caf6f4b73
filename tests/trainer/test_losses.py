"""Loss terms."""

import math

import pytest
import torch
from torch import Tensor

from rallypoint.trainer.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    gaussian_entropy,
    gaussian_log_prob,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


RATIO, ADVANTAGE = vector(1, 1.5, 0.7, 0.7), vector(1, 1, 1, -1)
VALUE, VALUE_OLD, RETURNS = vector(1, 1), vector(0.5, 0.5), vector(0.6, 2)


def test_numeric_09_policy_loss() -> None:
    assert clipped_policy_loss(RATIO, ADVANTAGE, clip=0.2).item() == pytest.approx(-0.525)
    total = clipped_policy_loss(RATIO, ADVANTAGE, clip=0.2, reduction="sum")
    assert total.item() == pytest.approx(-2.1)


def test_numeric_09_value_loss() -> None:
    assert clipped_value_loss(VALUE, VALUE_OLD, RETURNS, clip=0.2).item() == pytest.approx(0.925)
    total = clipped_value_loss(VALUE, VALUE_OLD, RETURNS, clip=0.2, reduction="sum")
    assert total.item() == pytest.approx(1.85)


def test_nothing_sums_to_zero() -> None:
    nothing = vector()
    assert clipped_policy_loss(nothing, nothing, clip=0.2, reduction="sum").item() == 0.0
    assert clipped_value_loss(nothing, nothing, nothing, clip=0.2, reduction="sum").item() == 0.0


def test_density_and_entropy_of_a_normal_distribution() -> None:
    actions, mean, std = vector(0.3, -2.0)[None], vector(0.1, -1.0)[None], vector(0.1, 2.5)
    each = [
        -0.5 * ((x - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
        for x, m, s in ((0.3, 0.1, 0.1), (-2.0, -1.0, 2.5))
    ]
    assert gaussian_log_prob(actions, mean, std).tolist() == pytest.approx([sum(each)])
    entropy = sum(0.5 * math.log(2 * math.pi * math.e * s**2) for s in (0.1, 2.5))
    assert gaussian_entropy(std).item() == pytest.approx(entropy)
