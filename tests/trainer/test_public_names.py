"""The names that others script against: signatures, number types, inputs left alone."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rallypoint.trainer.envbudget import split
from rallypoint.trainer.gae import compute_gae
from rallypoint.trainer.kl import gaussian_kl, next_learning_rate
from rallypoint.trainer.losses import clipped_policy_loss, clipped_value_loss
from rallypoint.trainer.statistics import Moments, standardise

SIGNATURES: dict[Callable[..., Any], str] = {
    compute_gae: "rewards, values, last_values, terminated, truncated, *, gamma, lam",
    standardise: "x, moments, *, ddof=1, eps=1e-08",
    gaussian_kl: "mu_old, sigma_old, mu, sigma, *, form='exact'",
    next_learning_rate: "lr, kl, *, target, bounds",
    clipped_policy_loss: "ratio, advantage, *, clip, reduction='mean'",
    clipped_value_loss: "value, value_old, returns, *, clip, reduction='mean'",
    split: "total, world_size, multiple",
    Moments.of: "x",
    Moments.merge: "self, other",
    Moments.variance: "self, ddof",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures_stay(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = inspect.Signature(bare)
    assert str(shown) == f"({SIGNATURES[function]})"


def calls(
    dtype: torch.dtype,
) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]]:
    """A call of each function of tensors, with leading sizes 4 and 3."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype) + 0.5

    flags = some(4, 3) > 1.2, some(4, 3) > 1.2
    moments = Moments.of(some(5, 3))
    return {
        "gae": (compute_gae, (some(4, 3), some(4, 3), some(3), *flags), {"gamma": 0.9, "lam": 0.8}),
        "exact": (gaussian_kl, (some(4, 3), some(3), some(4, 3), some(3)), {}),
        "sonic": (gaussian_kl, (some(4, 3), some(3), some(4, 3), some(3)), {"form": "sonic"}),
        "policy": (clipped_policy_loss, (some(12), some(12)), {"clip": 0.2}),
        "value": (clipped_value_loss, (some(12), some(12), some(12)), {"clip": 0.2}),
        "standardise": (lambda x: standardise(x, moments), (some(4, 3),), {}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", calls(torch.float64))
def test_the_number_type_goes_through_and_inputs_stay(name: str, dtype: torch.dtype) -> None:
    function, arguments, options = calls(dtype)[name]
    before = [argument.clone() for argument in arguments]
    results = function(*arguments, **options)
    assert all(map(torch.equal, before, arguments))
    for result in results if isinstance(results, tuple) else (results,):
        assert result.dtype == dtype
        assert result.isfinite().all()


def test_flags_may_be_numbers() -> None:
    _, (rewards, values, last, terminated, truncated), options = calls(torch.float64)["gae"]
    expected = compute_gae(rewards, values, last, terminated, truncated, **options)
    found = compute_gae(rewards, values, last, terminated.double(), truncated.byte(), **options)
    assert all(map(torch.equal, found, expected))


def test_moments_are_of_float64_whatever_comes_in() -> None:
    x = torch.tensor([[1.0, 2.0], [4.0, 2.0]])
    before = x.clone()
    moments = Moments.of(x)
    assert torch.equal(x, before)
    assert moments.mean.dtype == moments.m2.dtype == torch.float64
    assert (moments.count, moments.mean.tolist(), moments.m2.tolist()) == (
        2,
        [2.5, 2.0],
        [4.5, 0.0],
    )
    assert moments.variance(0).tolist() == [2.25, 0.0]
    assert moments.variance(1).tolist() == [4.5, 0.0]


@pytest.mark.parametrize(("count", "ddof"), [(0, 0), (0, 1), (1, 1), (1, 2)])
def test_too_few_samples_have_the_variance_zero(count: int, ddof: int) -> None:
    moments = Moments.of(torch.ones(count, 3))
    assert moments.variance(ddof).tolist() == [0.0, 0.0, 0.0]
    assert standardise(torch.ones(2, 3), moments).isfinite().all()


def test_no_rows_change_nothing_in_a_merge() -> None:
    some, nothing = Moments.of(torch.randn(5, 2)), Moments.of(torch.zeros(0, 2))
    for merged in (some.merge(nothing), nothing.merge(some), nothing.merge(some).merge(nothing)):
        assert merged.count == 5
        assert torch.equal(merged.mean, some.mean)
        assert torch.equal(merged.m2, some.m2)
    assert nothing.merge(nothing).count == 0


@pytest.mark.parametrize("sizes", [(24,), (5, 19), (3, 9, 12), (0, 7, 8, 9)], ids=str)
def test_numeric_08_each_critic_head_is_standardised_by_itself(sizes: tuple[int, ...]) -> None:
    """Advantages ``[K, C]`` of C heads of very different scale, on W ranks with uneven shares."""
    generator = torch.Generator().manual_seed(len(sizes))
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    x = x * torch.tensor([1.0, 1e3, 0.1]) + torch.tensor([0.0, -50.0, 7.0])
    merged = Moments.of(x[:0])
    for part in torch.split(x, list(sizes)):
        merged = merged.merge(Moments.from_vector(Moments.of(part).to_vector()))
    result = standardise(x, merged)
    assert (result.mean(0).abs() <= 1e-6).all()
    torch.testing.assert_close(result.std(0), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("total", "world_size", "multiple"), [(100, 3, 8), (16, 3, 8), (0, 1, 8), (8, 0, 8), (8, 1, 0)]
)
def test_a_split_that_cannot_be_is_a_value_error_with_the_values(
    total: int, world_size: int, multiple: int
) -> None:
    with pytest.raises(ValueError, match=r"\d") as caught:
        split(total, world_size, multiple)
    for value in {total, world_size, multiple}:
        assert str(value) in str(caught.value)


def test_a_split_is_of_positive_multiples_as_even_as_possible() -> None:
    for total, world_size in itertools.product((64, 72, 104), range(1, 9)):
        counts = split(total, world_size, 8)
        assert sum(counts) == total
        assert min(counts) >= 8
        assert max(counts) - min(counts) <= 8
        assert not any(count % 8 for count in counts)
