"""SONIC's normaliser update within epochs, for fidelity."""

import pytest
import torch
from torch import Tensor

from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.epochstats import EpochStatistics
from rallypoint.trainer.minibatches import MiniBatches
from rallypoint.trainer.normaliser import Normaliser
from rallypoint.trainer.ordered import RankReduction
from rallypoint.trainer.statistics import Moments
from tests.fakes.training import config, largest_difference, make_worker, train

SETTINGS = config(normaliser_update="sonic_epochs", epochs=3, mini_batches=2)


def test_a_mini_batch_is_normalised_by_what_has_been_dealt_so_far() -> None:
    worker = make_worker(SETTINGS, (0, 1))
    rollout = worker.collect(1)
    zeros = torch.zeros_like(rollout.rewards)
    samples = MiniBatches(rollout, zeros, zeros, SETTINGS.ppo, seed=1)
    normaliser = Normaliser(worker.env.spec.obs_dims, SETTINGS.ppo, torch.device("cpu"))
    reduction = RankReduction(SingleProcess(), worker.learner.module)
    statistics = EpochStatistics(normaliser, reduction, [samples], iteration=1, epochs=3)
    seen: list[Tensor] = []
    for epoch in range(3):
        for raw in samples.epoch(1, epoch):
            seen.append(raw.actor_obs)
            (batch,) = statistics.advance([raw])
            so_far = Moments.of(torch.cat(seen))
            expected = (raw.actor_obs - so_far.mean) / (so_far.variance(ddof=0) + 1e-5).sqrt()
            torch.testing.assert_close(batch.actor_obs, expected.clamp(-5, 5), rtol=0, atol=1e-9)
            assert batch.critic_obs is batch.actor_obs
    assert normaliser.moments("actor").count == 3 * rollout.env_steps


def test_each_sample_counts_once_per_epoch_and_the_end_adds_nothing() -> None:
    workers = train(SETTINGS, [(0, 1), (2,)], 2)
    steps = 3 * 8 * SETTINGS.ppo.rollout_steps
    assert {w.live()["normaliser/actor/count"].item() for w in workers} == {2 * 3 * steps}
    assert len({w.packed().hash() for w in workers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shards", [((0, 1), (2, 3)), ((1, 3), (), (0, 2))], ids=str)
def test_ranks_equal_one_process(shards: tuple[tuple[int, ...], ...]) -> None:
    union = train(SETTINGS, [range(4)], 5)[0]
    for worker in train(SETTINGS, shards, 5):
        assert largest_difference(worker, union) <= 1e-10


def test_a_redone_update_ends_where_the_first_did() -> None:
    worker = make_worker(SETTINGS, (0, 1))
    rollout = worker.collect(1)
    before = {name: tensor.detach().clone() for name, tensor in worker.live().items()}
    worker.update(rollout, SingleProcess(), 1)
    first = worker.packed().hash()
    worker.load(before)
    worker.update(rollout, SingleProcess(), 1)
    assert worker.packed().hash() == first
    assert worker.live()["normaliser/actor/count"] == 3 * rollout.env_steps


@pytest.mark.slow
def test_ordered_sums_take_it_too() -> None:
    settings = config(
        normaliser_update="sonic_epochs", epochs=2, mini_batches=2, reduction="ordered"
    )
    union = train(settings, [range(3)], 2)[0]
    for worker in train(settings, [(0, 2), (1,)], 2):
        assert worker.packed().hash() == union.packed().hash()
