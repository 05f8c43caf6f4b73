"""Generalised advantage estimation. Numbers are those of the numeric reference tests."""

import pytest
import torch
from torch import Tensor

from rallypoint.trainer.gae import compute_gae
from rallypoint.trainer.statistics import Moments, standardise

REWARDS = torch.tensor([[1, 2, 0, 1], [0.5, -1, 1, 2]], dtype=torch.float64).T
VALUES = torch.tensor([[0.5, 0.4, 0.1, 0.2], [0.2, 0.3, 0.6, 0.7]], dtype=torch.float64).T
LAST_VALUES = torch.tensor([0.3, 0.8], dtype=torch.float64)
ADVANTAGES = torch.tensor(
    [[2.4008, 1.6, 1.1297285, 1.097], [0.8122400085, 0.228857, 0.994, 2.092]], dtype=torch.float64
).T


def flags(*where: tuple[int, int]) -> Tensor:
    """``[4, 2]`` flags, set at (step, env)."""
    result = torch.zeros(4, 2, dtype=torch.bool)
    for step, env in where:
        result[step, env] = True
    return result


def gae(terminated: Tensor, truncated: Tensor) -> tuple[Tensor, Tensor]:
    return compute_gae(REWARDS, VALUES, LAST_VALUES, terminated, truncated, gamma=0.99, lam=0.95)


def test_numeric_06_termination_and_time_out() -> None:
    advantages, returns = gae(flags((1, 0)), flags((2, 1)))
    torch.testing.assert_close(advantages, ADVANTAGES, rtol=0, atol=1e-9)
    torch.testing.assert_close(returns, ADVANTAGES + VALUES, rtol=0, atol=1e-9)


def test_numeric_07_standardised_over_ranks() -> None:
    # Two ranks of one env each: moments are merged, never averaged.
    moments = Moments.of(ADVANTAGES[:, 0]).merge(Moments.of(ADVANTAGES[:, 1]))
    expected = torch.tensor(
        [
            [1.56975982, 0.43365888, -0.23351881, -0.27995097],
            [-0.68394210, -1.51159193, -0.42607784, 1.13166295],
        ],
        dtype=torch.float64,
    ).T
    torch.testing.assert_close(standardise(ADVANTAGES, moments), expected, rtol=0, atol=1e-8)


def test_termination_wins_over_time_out() -> None:
    both, _ = gae(flags((2, 1)), flags((2, 1)))
    only_terminated, _ = gae(flags((2, 1)), flags())
    assert torch.equal(both, only_terminated)


def test_time_out_is_bootstrapped_with_the_value_before_the_step() -> None:
    advantages, _ = gae(flags(), flags((3, 0)))
    # delta = r + gamma V(s_3) - V(s_3), nothing after it
    assert advantages[3, 0].item() == pytest.approx(1 + 0.99 * 0.2 - 0.2, abs=1e-12)


def test_inputs_stay_as_they_are() -> None:
    before = [x.clone() for x in (REWARDS, VALUES, LAST_VALUES)]
    gae(flags((1, 0)), flags((2, 1)))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (REWARDS, VALUES, LAST_VALUES), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_envs(dtype: torch.dtype) -> None:
    nothing = torch.zeros(4, 0, dtype=dtype)
    advantages, returns = compute_gae(
        nothing, nothing, nothing[0], nothing.bool(), nothing.bool(), gamma=0.99, lam=0.95
    )
    assert advantages.shape == returns.shape == (4, 0)
    assert advantages.dtype == returns.dtype == dtype
