"""Auxiliary losses: global masked means, whoever has which samples."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import AuxSection, Config
from rallypoint.daemon.shared.configload import load, parse_assignment
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.trainer.evaluate import configuration, restore_learner
from rallypoint.trainer.latent import TERMS, LatentActorCritic
from rallypoint.trainer.rng import Purpose, uniform
from tests.fakes.checkpoints import save
from tests.fakes.gloo import collectives_over_gloo, train_over_gloo
from tests.fakes.training import BLOCK, Worker, config, make_worker, train

SHARE = 0.5


def settings(share: float = SHARE, **aux: float) -> Config:
    """Two epochs of two mini-batches in float64. Weights so large that an error in them is seen."""
    section = AuxSection(latent=6, privileged_share=share, reconstruction_coef=0.5, **aux)
    return replace(config(epochs=2, mini_batches=2, hidden=(16,)), aux=section)


def driven(block: int, iteration: int = 1) -> int:
    """How many envs of a block the privileged encoder drives."""
    ids = torch.arange(block * BLOCK, (block + 1) * BLOCK).numpy()
    return int((uniform(1, Purpose.ENCODER, ids, iteration, 0, 1) < SHARE).sum())


def assert_equal(workers: list[Worker], union: Worker) -> None:
    for worker in workers:
        for name, expected in union.live().items():
            torch.testing.assert_close(worker.live()[name], expected, rtol=0, atol=1e-10)
        for one, other in zip(worker.history, union.history, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_numeric_04_masked_means_are_those_of_one_process() -> None:
    union = train(settings(), [range(4)], 3)[0]
    assert {driven(block) for block in range(4)} != {BLOCK // 2}, "populations must be uneven"
    for shards in [((0,), (1, 2, 3)), ((0, 1, 2, 3), ())]:
        assert_equal(train(settings(), shards, 3), union)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_numeric_04_a_population_without_members_anywhere(share: float) -> None:
    union = train(settings(share), [range(2)], 2)[0]
    assert_equal(train(settings(share), ((0,), (1,)), 2), union)
    figures = union.history[-1]
    absent = {TERMS[0]} if share else {*TERMS[1:]}
    assert absent.isdisjoint(figures)
    assert {*TERMS} - absent <= figures.keys()
    assert all(torch.isfinite(tensor).all() for tensor in union.live().values())


@pytest.mark.slow
def test_numeric_04_a_rank_without_members_over_gloo(tmp_path: Path) -> None:
    """Rank 1 has no env, then one block each in which shares differ; DDP must not wait for anybody."""
    trainings = (((0, 1), ()), ((0,), (1,)))
    found = train_over_gloo(settings(), trainings, 2, tmp_path)
    union = train(settings(), [range(2)], 2)[0].live()
    for ranks in found:
        for rank in ranks:
            for name, expected in union.items():
                torch.testing.assert_close(rank[name], expected.detach(), rtol=0, atol=1e-10)
    first, second = collectives_over_gloo(tmp_path, 2)
    assert first == second
    names = [name for name, _, _ in first]
    per_iteration = len(names) // 4
    assert names[:per_iteration].count("mini_batch") == 4
    assert names[:per_iteration].count("aux_counts") == 1
    assert set(names) == {"advantage_moments", "aux_counts", "mini_batch", "gradients", "last"}


def test_a_mean_of_rank_means_would_be_another() -> None:
    """The case can tell: populations of the two ranks differ in size."""
    few, many = sorted(range(4), key=driven)[:1], sorted(range(4), key=driven)[1:]
    assert driven(few[0]) / BLOCK != sum(map(driven, many)) / (BLOCK * len(many))


def test_losses_fall_and_the_actor_needs_its_own_encoder_alone() -> None:
    worker = train(settings(scale=2.0), [range(2)], 12)[0]
    # From the second iteration on observations are normalised.
    first, last = worker.history[1], worker.history[-1]
    assert last["aux_latent"] < first["aux_latent"]
    assert last["aux_reconstruction_actor"] < first["aux_reconstruction_actor"]
    assert last["aux_total"] == pytest.approx(2.0 * last["aux_total_unscaled"])
    own = make_worker(settings(0.0), (0,)).collect(1)
    other = make_worker(settings(1.0), (0,)).collect(1)
    assert not torch.equal(own.mean, other.mean)
    module = worker.learner.module
    assert isinstance(module, LatentActorCritic)
    with torch.no_grad():
        obs = torch.zeros(3, own.actor_obs.shape[-1], dtype=torch.float64)
        expected = module(obs, obs, torch.zeros(3, dtype=torch.bool))[0]
        torch.testing.assert_close(module.mean(obs), expected)


def test_a_checkpoint_says_what_it_needs_to_act(tmp_path: Path) -> None:
    worker = train(settings(), [(0,)], 1)[0]
    loaded = load_checkpoint(str(save(tmp_path, worker, settings())))
    found = restore_learner(loaded, configuration(loaded), worker.env.spec)
    obs = {"actor": worker.env.begin_rollout(2)["actor"]}
    assert torch.equal(found.mean_action(obs), worker.learner.mean_action(obs))


def test_the_update_begins_at_the_policy_that_collected() -> None:
    worker = train(
        replace(settings(), ppo=replace(settings().ppo, epochs=1, mini_batches=1)), [(0,)], 1
    )[0]
    assert worker.history[0]["kl"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["aux.latent=0"], "at least 1"),
        (["aux.privileged_share=2.0"], "from 0 to 1"),
        (["aux.scale=-1.0"], "negative"),
        (["aux.latent=4", "distill.teacher=runs/x"], "does not go with"),
    ],
)
def test_settings_that_make_no_sense_are_refused(assignments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(command_line=[parse_assignment(text) for text in assignments])
