"""Figures of an iteration: global sums over global weights."""

import math
from dataclasses import replace

import pytest
import torch

from rallypoint.trainer import figures
from rallypoint.trainer.figures import Layout, Measured
from rallypoint.trainer.rollout import Rollout
from tests.fakes.training import config, make_worker

LAYOUT = Layout({}, ("distance_m",))


def rollout(returns: list[float], *, blocks: tuple[int, ...] = (0,)) -> Rollout:
    """A rollout in which episodes with these returns ended."""
    base = make_worker(config(normalise_actor=False, normalise_critic=False), blocks).collect(1)
    ended = torch.tensor(returns, dtype=torch.float64)
    return replace(base, episode_returns=ended, episode_lengths=torch.ones_like(ended))


def merged(*rollouts: Rollout) -> dict[str, float]:
    return figures.unpack(LAYOUT, [figures.pack(LAYOUT, r, Measured()) for r in rollouts])[1]


def test_numeric_39_episode_means_are_weighted_by_count() -> None:
    result = merged(rollout([8.0, 10.0, 12.0]), rollout([2.0]), rollout([]))
    assert result["episode_return_mean"] == 8.0
    assert result["episode_length_mean"] == 1.0


def test_numeric_39_no_episode_anywhere_leaves_the_figure_out() -> None:
    result = merged(rollout([]), rollout([]))
    assert "episode_return_mean" not in result
    assert "policy_loss" not in result  # nothing was updated either
    assert all(math.isfinite(value) for value in result.values())


def test_an_empty_rank_changes_nothing() -> None:
    full = rollout([4.0])
    alone, beside = merged(full), merged(full, rollout([], blocks=()))
    assert alone == beside
    assert alone["reward_mean"] == pytest.approx(full.rewards.mean().item())
    assert alone["figure/distance_m"] == pytest.approx(
        full.figures["distance_m"].sum().item() / full.env_steps
    )


def test_samples_weigh_alike_whatever_rank_they_come_from() -> None:
    few, many = Measured(), Measured()
    few.add(torch.full((5,), 10.0, dtype=torch.float64), 1, 2.0)
    many.add(torch.full((5,), 30.0, dtype=torch.float64), 3, 2.0)
    some = rollout([])
    records = [figures.pack(LAYOUT, some, measured) for measured in (few, many)]
    result = figures.unpack(LAYOUT, records)[1]
    assert result["policy_loss"] == 10.0
    assert result["gradient_norm"] == 2.0
