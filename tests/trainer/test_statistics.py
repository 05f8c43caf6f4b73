"""Moments that merge, and the observation normaliser on top of them."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.normaliser import Normaliser
from rallypoint.trainer.statistics import Moments, standardise


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


RANKS = [Moments.of(column(0, 2)), Moments.of(column(10, 12, 14)), Moments.of(column(-5))]


def normaliser_of(size: int, **ppo: object) -> Normaliser:
    """Of one group; keywords are keys of ``[ppo]``."""
    section = replace(PpoSection(), **ppo)  # type: ignore[arg-type]
    return Normaliser({"actor": size}, section, torch.device("cpu"))


def assert_same(a: Moments, b: Moments, atol: float = 1e-12) -> None:
    assert a.count == b.count
    torch.testing.assert_close(a.mean, b.mean, rtol=atol, atol=atol)
    torch.testing.assert_close(a.m2, b.m2, rtol=atol, atol=atol)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_numeric_18_merging_in_any_order_and_grouping(order: tuple[int, ...]) -> None:
    a, b, c = (RANKS[i] for i in order)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
        assert merged.count == 6
        assert merged.mean.item() == pytest.approx(5.5, abs=1e-12)
        assert merged.m2.item() == pytest.approx(287.5, abs=1e-12)
        assert merged.variance(0).item() == pytest.approx(47.9166666667, abs=1e-9)
        assert merged.variance(1).item() == pytest.approx(57.5, abs=1e-12)


def test_numeric_19_the_difference_of_means_is_old_against_new() -> None:
    merged = Moments.of(column(0, 0)).merge(Moments.of(column(2, 2)))
    assert (merged.mean.item(), merged.variance(0).item()) == (1.0, 1.0)


def test_numeric_21_shifted_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    normaliser = normaliser_of(1)
    for _ in range(20):
        for rank in range(4):
            x = torch.randn(1000, 1, generator=generator, dtype=torch.float64) + 10 * rank
            normaliser.merge("actor", Moments.of(x))
    moments = normaliser.moments("actor")
    assert moments.count == 80_000
    assert moments.mean.item() == pytest.approx(15, abs=0.02)
    assert moments.variance(0).item() == pytest.approx(126, abs=0.5)


def test_numeric_20_merging_nothing_changes_nothing() -> None:
    normaliser = normaliser_of(2)
    normaliser.merge("actor", Moments.of(torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.1, 0.7]])))
    before = {name: tensor.clone() for name, tensor in normaliser.tensors().items()}
    for _ in range(5):
        normaliser.merge("actor", Moments.of(torch.zeros(0, 2)))
    after = normaliser.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_numeric_20_counts_stay_exact_beyond_float32() -> None:
    normaliser = normaliser_of(1)
    zero = torch.zeros(1, dtype=torch.float64)
    normaliser.merge("actor", Moments(2**24, zero, zero))
    normaliser.merge("actor", Moments.of(torch.ones(1, 1)))
    assert normaliser.moments("actor").count == 2**24 + 1
    assert Moments.from_vector(Moments(2**40 + 1, zero, zero).to_vector()).count == 2**40 + 1


def test_numeric_22_without_a_prior_the_first_iteration_is_raw() -> None:
    normaliser = normaliser_of(1)
    assert normaliser.moments("actor").count == 0
    obs = torch.tensor([[0.5], [-2.0]])
    torch.testing.assert_close(normaliser.scaling(torch.float32).apply("actor", obs), obs)


def test_numeric_22_a_prior_is_counted_once() -> None:
    """Three ranks, two iterations: mean 0, variance 1, count 1 enter once, not once a rank or a merge."""
    normaliser = normaliser_of(1, normaliser_prior=1)
    for _ in range(2):
        for delta in RANKS:
            normaliser.merge("actor", delta)
    prior = Moments(1, torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert_same(
        normaliser.moments("actor"), functools.reduce(Moments.merge, [prior, *RANKS, *RANKS])
    )
    assert normaliser.moments("actor").count == 13


@pytest.mark.parametrize("sizes", [(24,), (8, 16), (3, 5, 16), (0, 24), (6, 6, 6, 6)], ids=str)
def test_numeric_08_standardised_moments_are_0_and_1(sizes: tuple[int, ...]) -> None:
    x = torch.randn(24, generator=torch.Generator().manual_seed(len(sizes)), dtype=torch.float64)
    x = 3 * x + 7
    moments = Moments.of(x[:0])
    for part in torch.split(x, list(sizes)):
        moments = moments.merge(Moments.of(part))
    result = standardise(x, moments)
    assert abs(result.mean().item()) <= 1e-6
    assert abs(result.std().item() - 1) <= 1e-6


def test_numeric_08_constant_values_become_zeros() -> None:
    x = torch.full((24,), 0.1, dtype=torch.float64)
    moments = Moments.of(x[:7]).merge(Moments.of(x[7:]))
    assert torch.equal(standardise(x, moments), torch.zeros(24, dtype=torch.float64))


def test_a_single_sample_has_no_variance() -> None:
    moments = Moments.of(column(3))
    assert moments.variance(1).item() == 0.0
    assert moments.variance(0).item() == 0.0
    assert torch.isfinite(standardise(column(3), moments)).all()


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=30),
    st.lists(st.floats(-1e6, 1e6), max_size=30),
)
def test_merging_equals_taking_all_at_once(a: list[float], b: list[float]) -> None:
    merged = Moments.of(column(*a)).merge(Moments.of(column(*b)))
    union = Moments.of(column(*a, *b))
    scale = max([1.0, *map(abs, a), *map(abs, b)])
    assert merged.count == union.count
    assert (merged.mean - union.mean).abs().max().item() <= 1e-12 * scale
    assert (merged.m2 - union.m2).abs().max().item() <= 1e-11 * scale**2 * max(1, union.count)


def test_no_rows_are_the_neutral_element() -> None:
    nothing = Moments.of(torch.zeros(0, 3))
    some = Moments.of(torch.randn(5, 3))
    assert nothing.count == 0
    for merged in (nothing.merge(some), some.merge(nothing)):
        assert_same(merged, some, atol=0)


def test_values_far_from_zero_keep_their_variance() -> None:
    moments = Moments.of(column(1e9 + 1, 1e9 + 2, 1e9 + 3))
    assert moments.variance(1).item() == 1.0


def test_a_vector_holds_all_of_it() -> None:
    moments = Moments.of(torch.randn(7, 4))
    assert_same(Moments.from_vector(moments.to_vector()), moments, atol=0)
    scalar = Moments.of(torch.randn(7))
    assert_same(standalone(scalar), scalar, atol=0)


def standalone(moments: Moments) -> Moments:
    """Through a vector and back, with samples of no dim."""
    back = Moments.from_vector(moments.to_vector())
    return Moments(back.count, back.mean.reshape(()), back.m2.reshape(()))


def test_the_normaliser_standardises_and_clamps() -> None:
    normaliser = normaliser_of(1)
    normaliser.merge("actor", Moments.of(column(1, 3)))
    scaling = normaliser.scaling(torch.float64)
    obs = column(2, 3, 1000)
    expected = column(0, (1 / (1 + 1e-5)) ** 0.5, 5)
    torch.testing.assert_close(scaling.apply("actor", obs), expected)


def test_the_other_form_adds_to_the_standard_deviation_and_need_not_clamp() -> None:
    normaliser = normaliser_of(1, normaliser_form="std", normaliser_clip=None)
    normaliser.merge("actor", Moments.of(column(0, 4)))
    scaled = normaliser.scaling(torch.float64).apply("actor", column(2, 4, 1002))
    torch.testing.assert_close(scaled, column(0, 2 / 2.01, 1000 / 2.01))


@pytest.mark.parametrize("actor", [True, False])
@pytest.mark.parametrize("critic", [True, False])
def test_actor_and_critic_are_normalised_by_themselves(actor: bool, critic: bool) -> None:
    normaliser = normaliser_of(1, normalise_actor=actor, normalise_critic=critic)
    assert list(normaliser.dims) == (["actor"] if actor or critic else [])
    if normaliser.dims:
        normaliser.merge("actor", Moments.of(column(1, 3)))
    scaling, obs = normaliser.scaling(torch.float64), column(2, 3)
    for network, on in (("actor", actor), ("critic", critic)):
        assert torch.equal(scaling.apply(network, obs), obs) is not on
    assert scaling.alike is (actor == critic)


def test_the_normaliser_writes_in_place() -> None:
    normaliser = normaliser_of(1)
    before = dict(normaliser.tensors())
    normaliser.merge("actor", Moments.of(column(1, 3)))
    assert all(normaliser.tensors()[name] is tensor for name, tensor in before.items())
    assert before["actor/count"].item() == 2
