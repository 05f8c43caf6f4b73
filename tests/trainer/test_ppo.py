"""The learner as the worker's loop sees it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.registry import Scope
from tests.fakes.training import BLOCK, config, make_worker, train


def test_all_state_is_registered_with_its_scope() -> None:
    worker = make_worker(config(), (0,))
    scopes = {name: worker.registry.scope_of(name) for name in worker.live()}
    assert {name.split("/")[0] for name in scopes} == {"model", "normaliser", "optimiser"}
    assert scopes["model/log_std"] is Scope.REPLICATED
    assert scopes["optimiser/learning_rate"] is Scope.REPLICATED
    assert scopes["optimiser/exp_avg/log_std"] is Scope.REPLICATED
    assert scopes["normaliser/actor/m2"] is Scope.GLOBAL


def test_the_layout_of_the_state_never_changes() -> None:
    worker = make_worker(config(), (0,))
    before = dict(worker.live())
    rollout = worker.collect(1)
    worker.update(rollout, SingleProcess(), 1)
    worker.finish(rollout, SingleProcess())
    after = worker.live()
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items() if "model" not in name)
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in before.items())
    assert after["optimiser/steps"].eq(20).all()
    assert after["normaliser/actor/count"].item() == rollout.env_steps


def test_every_rank_starts_from_the_same_parameters() -> None:
    torch.manual_seed(1)
    one = make_worker(config(), (0,))
    torch.manual_seed(2)
    assert make_worker(config(), (5,)).packed().hash() == one.packed().hash()


def test_building_a_learner_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_worker(config(), (0,))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_packing_is_repeatable() -> None:
    worker = make_worker(config(), (0,))
    rollout = worker.collect(1)
    worker.update(rollout, SingleProcess(), 1)
    first = worker.learner.pack(rollout)
    assert first.dtype == torch.float64
    assert first.dim() == 1
    assert torch.equal(worker.learner.pack(rollout), first)
    assert worker.learner.pack(make_worker(config(), ()).collect(1)).shape == first.shape


def test_figures_have_the_names_that_metrics_use() -> None:
    worker = train(config(), [(0, 1)], 2)[0]
    assert set(worker.history[1]) == {
        "reward_mean",
        "episode_return_mean",
        "episode_length_mean",
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "clip_fraction",
        "learning_rate",
        "noise_std",
        "gradient_norm",
        "skipped_steps",
        "ppo_loss",
        "value_clip_fraction",
        "ratio_mean",
        "ratio_var",
        "advantage_mean",
        "advantage_std",
        "rollout_entropy",
        "figure/distance_m",
    }
    assert worker.history[1]["learning_rate"] == worker.learning_rates[-1]


def test_running_episodes_survive_a_change_of_envs() -> None:
    worker = make_worker(config(rollout_steps=4), (0, 1))
    worker.collect(1)
    ids = np.arange(BLOCK, 3 * BLOCK)  # block 0 goes, block 2 comes
    worker.env.assign(ids, iteration=1)
    worker.learner.on_assign(worker.env.env_ids)
    lengths = []
    for iteration in range(2, 16):
        lengths += worker.collect(iteration).episode_lengths.tolist()
    # pointmass episodes last 50 steps, less the phase at which an env enters.
    assert max(lengths) <= 50
    assert len(lengths) >= 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "seed", "figure", "least_gain"),
    # Rewards are rates: 0.15 a second over steps of 0.1 s, and 60 more steps of 0.02 s upright.
    [
        ("pointmass", 1, "reward_mean", 0.15 * 0.1),
        # With seed 1 it may only have begun to by then, as the last bits will.
        ("cartpole", 3, "episode_return_mean", 60 * 0.02),
    ],
)
def test_it_learns(task: str, seed: int, figure: str, least_gain: float) -> None:
    job = config(task=task, dtype="float32")
    worker = train(replace(job, job=replace(job.job, seed=seed)), [range(4)], 50)[0]
    values = [figures[figure] for figures in worker.history if figure in figures]
    first, last = np.mean(values[:5]), np.mean(values[-5:])
    assert last - first >= least_gain, (first, last)
