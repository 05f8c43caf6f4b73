"""Figures of an iteration: global sums over global weights."""

import math
from dataclasses import replace

import pytest
import torch

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer import figures
from rallypoint.trainer.figures import SAMPLE_FIGURES, Layout, Measured
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.update import advantages_of
from tests.fakes.training import config, make_worker, train

N = len(SAMPLE_FIGURES)
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


def test_numeric_39_terms_of_the_reward_are_means_over_episodes() -> None:
    layout = Layout({}, (), reward_terms=("walk",))
    parts = [
        replace(rollout(list(returns)), episode_terms={"walk": torch.tensor(terms).double()})
        for returns, terms in (((8.0, 10.0, 12.0), (1.0, 2.0, 3.0)), ((2.0,), (6.0,)), ((), ()))
    ]
    records = [figures.pack(layout, part, Measured()) for part in parts]
    assert figures.unpack(layout, records)[1]["episode/rew_walk"] == 3.0
    assert "episode/rew_walk" not in figures.unpack(layout, records[2:])[1]


@pytest.mark.parametrize("task", ["cartpole", "quadruped-velocity"])
def test_terms_of_the_reward_add_up_to_it(task: str) -> None:
    worker = make_worker(config(task=task, rollout_steps=60), (0,))
    episodes = 0
    for iteration in range(1, 6):
        ended = worker.collect(iteration)
        total = torch.stack(tuple(ended.episode_terms.values())).sum(0)
        torch.testing.assert_close(total, ended.episode_returns)
        episodes += len(total)
    assert episodes


def test_spreads_are_those_of_the_union() -> None:
    worker = train(config(epochs=1, mini_batches=1), [(0,), (1, 2)], 1)[0]
    both = [make_worker(config(), blocks).collect(1) for blocks in ((0,), (1, 2))]
    advantages = torch.cat([advantages_of(r, PpoSection())[0].flatten() for r in both])
    result = worker.history[0]
    assert result["advantage_mean"] == pytest.approx(advantages.mean().item(), abs=1e-12)
    assert result["advantage_std"] == pytest.approx(advantages.std(correction=0).item())
    # Before the first step the policy is the one that collected.
    assert (result["ratio_mean"], result["ratio_var"]) == pytest.approx((1.0, 0.0), abs=1e-12)
    assert result["rollout_entropy"] == pytest.approx(result["entropy"])


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
    few.add(torch.full((N,), 10.0, dtype=torch.float64), 1, 2.0)
    many.add(torch.full((N,), 30.0, dtype=torch.float64), 3, 2.0)
    some = rollout([])
    records = [figures.pack(LAYOUT, some, measured) for measured in (few, many)]
    result = figures.unpack(LAYOUT, records)[1]
    assert result["policy_loss"] == 10.0
    assert result["gradient_norm"] == 2.0
