"""KL divergence and the adaptive learning rate."""

import math

import pytest
import torch

from rallypoint.trainer.kl import gaussian_kl, next_learning_rate

MU_OLD = torch.tensor([0.0, 0.1], dtype=torch.float64)
SIGMA_OLD = torch.tensor([0.1, 0.1], dtype=torch.float64)
MU = torch.tensor([0.05, 0.0], dtype=torch.float64)
SIGMA = torch.tensor([0.1, 0.2], dtype=torch.float64)


def test_numeric_10_both_forms() -> None:
    exact = gaussian_kl(MU_OLD, SIGMA_OLD, MU, SIGMA).item()
    sonic = gaussian_kl(MU_OLD, SIGMA_OLD, MU, SIGMA, form="sonic").item()
    assert exact == pytest.approx(0.5681471806, abs=1e-9)
    assert sonic == pytest.approx(0.5681621805, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numeric_10_identical_policies(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(64, 29, generator=generator, dtype=dtype)
    sigma = torch.rand(29, generator=generator, dtype=dtype) + 0.01
    assert torch.equal(gaussian_kl(mu, sigma, mu, sigma), torch.zeros(64, dtype=dtype))
    sonic = gaussian_kl(mu.double(), sigma.double(), mu.double(), sigma.double(), form="sonic")
    assert sonic[0].item() == pytest.approx(2.899986e-4, abs=1e-9)


def test_agrees_with_torch_distributions() -> None:
    old = torch.distributions.Normal(MU_OLD, SIGMA_OLD)
    new = torch.distributions.Normal(MU, SIGMA)
    expected = torch.distributions.kl_divergence(old, new).sum(-1)
    torch.testing.assert_close(gaussian_kl(MU_OLD, SIGMA_OLD, MU, SIGMA), expected)


def test_numeric_11_sequence() -> None:
    kls = [0.001] * 7 + [0.03, 0.03, 0.02, 0.005, 0.0049999, math.nan, 0.0]
    expected = [3e-5, 4.5e-5, 6.75e-5, 1.0125e-4, 1.51875e-4, 2e-4, 2e-4]
    expected += [1.3333333333e-4, 8.8888888889e-5, 8.8888888889e-5, 8.8888888889e-5]
    expected += [1.3333333333e-4, 1.3333333333e-4, 1.3333333333e-4]
    lr, found = 2e-5, []
    for kl in kls:
        lr = next_learning_rate(lr, kl, target=0.01, bounds=(1e-5, 2e-4))
        found.append(lr)
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_lower_bound_holds() -> None:
    assert next_learning_rate(1.2e-5, 1.0, target=0.01, bounds=(1e-5, 2e-4)) == 1e-5
