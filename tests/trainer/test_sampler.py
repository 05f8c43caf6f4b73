"""Formulas of adaptive motion sampling, by the numbers of the specification."""

import pytest
import torch
from torch import Tensor

from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.sampler import (
    capped_probabilities,
    ema_failures,
    ema_sampling_probabilities,
    sampling_probabilities,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, *expected: float, atol: float = 1e-9) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, vector(*expected), rtol=0, atol=atol)


def test_numeric_23_sonic() -> None:
    failures, episodes, lengths = vector(2, 4, 1), vector(5, 3, 3), vector(50, 50, 25)
    before = [x.clone() for x in (failures, episodes, lengths)]
    p = sampling_probabilities(failures, episodes, lengths, uniform=0.1, cap_ratio=50.0)
    close(p, 0.2278630460, 0.6741440378, 0.0979929162)
    assert abs(p.sum().item() - 1.0) <= 1e-12
    # Every bin has its even share before bins are weighted by their length.
    before_lengths = p / lengths
    assert (before_lengths / before_lengths.sum() >= 0.1 / 3).all()
    for now, then in zip((failures, episodes, lengths), before, strict=True):
        assert torch.equal(now, then)


def test_rates_are_cut_at_a_multiple_of_their_mean() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    p = sampling_probabilities(vector(97, 1, 1, 1), ones, ones, uniform=0.0, cap_ratio=2.0)
    close(p, 50 / 53, 1 / 53, 1 / 53, 1 / 53)


def test_numeric_26_equal_rates_go_by_bin_length() -> None:
    lengths = vector(50, 50, 30, 10)
    p = sampling_probabilities(
        vector(3, 6, 9, 3), vector(1, 2, 3, 1), lengths, uniform=0.1, cap_ratio=50.0
    )
    torch.testing.assert_close(p, lengths / lengths.sum(), rtol=0, atol=1e-15)


def test_no_failure_anywhere_is_even() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    close(sampling_probabilities(0 * ones, ones, ones, uniform=0.1, cap_ratio=50.0), *[0.25] * 4)


@pytest.mark.parametrize(
    ("bin_cap", "clip_cap"), [(0.3, None), (None, 0.45), (0.3, 0.45), (0.2, 0.5)]
)
def test_numeric_26_caps_hold_after_normalisation(
    bin_cap: float | None, clip_cap: float | None
) -> None:
    p = vector(0.6, 0.1, 0.15, 0.1, 0.03, 0.02)
    clips = [0, 0, 1, 1, 2, 2]
    capped = capped_probabilities(p, clips, bin_cap=bin_cap, clip_cap=clip_cap)
    assert abs(capped.sum().item() - 1.0) <= 1e-12
    assert (capped <= (bin_cap or 1.0) + 1e-15).all()
    by_clip = torch.zeros(3, dtype=torch.float64).index_add_(0, torch.tensor(clips), capped)
    assert (by_clip <= (clip_cap or 1.0) + 1e-15).all()
    assert capped.max() == capped[0]  # the order of bins stays
    assert torch.equal(p, vector(0.6, 0.1, 0.15, 0.1, 0.03, 0.02))


def test_caps_that_do_not_bind_change_nothing() -> None:
    p = vector(0.4, 0.3, 0.2, 0.1)
    capped = capped_probabilities(p, [0, 0, 1, 1], bin_cap=0.5, clip_cap=0.8)
    torch.testing.assert_close(capped, p, rtol=0, atol=1e-15)


def test_what_a_cap_cuts_goes_to_bins_without_weight_of_the_same_clip() -> None:
    close(
        capped_probabilities(vector(1, 0, 0), [0, 0, 1], bin_cap=0.5, clip_cap=None),
        0.5,
        0.5,
        0.0,
    )


@pytest.mark.parametrize(("bin_cap", "clip_cap"), [(0.2, None), (None, 0.4), (0.3, 0.49)])
def test_caps_that_cannot_hold_are_refused(bin_cap: float | None, clip_cap: float | None) -> None:
    p = vector(0.7, 0.1, 0.1, 0.1)
    with pytest.raises(
        TrainerError, match=f"bin_cap = {bin_cap} and sampler.clip_cap = {clip_cap}"
    ):
        capped_probabilities(p, [0, 0, 1, 1], bin_cap=bin_cap, clip_cap=clip_cap)


def test_numeric_27_ema() -> None:
    previous, failures = vector(0, 0, 0, 0), vector(0, 2, 1, 0)
    p = ema_sampling_probabilities(previous, failures, alpha=0.001, uniform=0.1)
    close(p, 0.2427184466, 0.2621359223, 0.2524271845, 0.2427184466)
    close(ema_failures(previous, failures, alpha=0.001), 0.0, 0.002, 0.001, 0.0, atol=1e-15)
    close(ema_failures(vector(4, 2), vector(0, 4), alpha=0.25), 3.0, 2.5, atol=1e-15)
    assert torch.equal(previous, vector(0, 0, 0, 0))
    assert torch.equal(failures, vector(0, 2, 1, 0))
