"""The update: W simulated ranks against one process, in float64 and on the same data."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.errors import GroupBroken
from rallypoint.trainer.kl import next_learning_rate
from rallypoint.trainer.minibatches import MiniBatches
from rallypoint.trainer.rollout import Rollout
from tests.fakes.collectives import LockStepGroup, LockStepRank
from tests.fakes.training import (
    BLOCK,
    Worker,
    config,
    largest_difference,
    make_worker,
    poisoned,
    train,
)

T, EPOCHS, MINI_BATCHES = 24, 5, 4
STEPS = EPOCHS * MINI_BATCHES
SHARDS = {
    "even": ((0, 1), (2, 3)),
    "uneven": ((1, 3), (0,), (2,)),
    "an empty rank": ((0, 1, 3), (), (2,)),
    "four": ((3,), (2,), (1,), (0,)),
}


def one_iteration(settings: Config, shards: tuple[tuple[int, ...], ...]) -> list[Worker]:
    return train(settings, shards, 1)


@pytest.mark.slow
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS.keys())
def test_numeric_01_02_12_ranks_equal_one_process(shards: tuple[tuple[int, ...], ...]) -> None:
    """200 optimiser steps: parameters, moments, statistics and every learning rate."""
    union = train(config(), [range(4)], 10)[0]
    ranks = train(config(), shards, 10)
    assert len(union.learning_rates) == 200
    assert len(set(union.learning_rates)) > 10  # the adaptive rule was at work
    for worker in ranks:
        assert worker.learning_rates == union.learning_rates
        assert largest_difference(worker, union) <= 1e-10
        assert worker.packed().hash() == ranks[0].packed().hash()


@pytest.mark.slow
def test_numeric_01_float32_for_one_iteration() -> None:
    union = one_iteration(config(dtype="float32"), ((0, 1, 2, 3),))[0]
    ranks = one_iteration(config(dtype="float32"), SHARDS["uneven"])
    parameters = dict(union.learner.module.named_parameters())
    for name, parameter in ranks[0].learner.module.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-5)


class Noting(LockStepRank):
    """Notes this rank's own mean KL at each mini-batch."""

    def __init__(self, group: LockStepGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.kls: list[float] = []

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        if name == "mini_batch":
            self.kls.append((value[0] / value[1]).item())
        return super().all_reduce_sum(name, value)


@pytest.mark.slow
def test_numeric_12_ranks_agree_where_their_own_kls_would_part_them() -> None:
    """Each alone would have gone another way at some steps; all take the one of the global KL."""
    shards = SHARDS["uneven"]
    group = LockStepGroup(len(shards))
    noting = [Noting(group, rank) for rank in range(len(shards))]
    group.ranks = [*noting]
    workers = [make_worker(config(), blocks) for blocks in shards]
    run_one(group, workers)
    run_one(group, workers, iteration=2)
    union = train(config(), [range(4)], 2)[0]
    assert [w.learning_rates for w in workers] == [union.learning_rates] * len(shards)
    rate, bounds = union.ppo.learning_rate, union.ppo.learning_rate_bounds
    parted = 0
    for step, reached in enumerate(union.learning_rates):
        own = [
            next_learning_rate(rate, rank.kls[step], target=0.01, bounds=bounds) for rank in noting
        ]
        parted += len(set(own)) > 1
        rate = reached
    assert parted > 0


class RankMeans(LockStepRank):
    """Divides the loss by this rank's own count: the mean of rank means."""

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        own = value[1].item()
        total = super().all_reduce_sum(name, value)
        total[1] = own * self.world_size
        return total


@pytest.mark.slow
def test_numeric_02_averaging_rank_means_is_caught() -> None:
    group = LockStepGroup(2)
    group.ranks = [RankMeans(group, rank) for rank in range(2)]
    workers = [make_worker(config(desired_kl=None), blocks) for blocks in ((0, 1, 2), (3,))]
    union = one_iteration(config(desired_kl=None), ((0, 1, 2, 3),))[0]
    run_one(group, workers)
    assert largest_difference(workers[0], union) > 1e-6


def run_one(
    group: LockStepGroup,
    workers: list[Worker],
    rollouts: list[Rollout] | None = None,
    *,
    iteration: int = 1,
) -> None:
    """One iteration of these workers on these rollouts, or ones of their own."""

    def work(rank: LockStepRank) -> None:
        worker = workers[rank.rank]
        rollout = worker.collect(iteration) if rollouts is None else rollouts[rank.rank]
        worker.update(rollout, rank, iteration)
        worker.finish(rollout, rank)

    group.run(work)


@pytest.mark.parametrize("field", ["actions", "mean"])
def test_numeric_13_16_all_ranks_skip_what_is_not_finite_on_one(field: str) -> None:
    """``actions`` spoils a loss, ``mean`` only a KL."""
    group = LockStepGroup(3)
    workers = [make_worker(config(), blocks) for blocks in SHARDS["uneven"]]
    rollouts = [worker.collect(1) for worker in workers]
    rollouts[1] = poisoned(rollouts[1], field)
    run_one(group, workers, rollouts)
    for worker in workers:
        # The env is in one mini-batch of each epoch.
        assert worker.history[0]["skipped_steps"] == EPOCHS
        assert len(worker.learning_rates) == STEPS - EPOCHS
        assert worker.live()["optimiser/steps"].eq(STEPS - EPOCHS).all()
        assert worker.learner.finite()
        assert worker.packed().hash() == workers[0].packed().hash()
        assert all(math.isfinite(value) for value in worker.history[0].values())


def test_numeric_16_a_step_that_is_skipped_changes_nothing() -> None:
    worker = make_worker(config(), (0,))
    before = worker.packed()
    rollout = poisoned(worker.collect(1), "rewards")  # spoils every advantage
    worker.update(rollout, SingleProcess(), 1)
    assert worker.packed().hash() == before.hash()
    assert worker.learning_rates == []


def test_numeric_16_a_parameter_that_is_not_finite_is_noticed() -> None:
    worker = make_worker(config(), (0,))
    assert worker.learner.finite()
    with torch.no_grad():
        worker.learner.module.free_noise()[0] = float("inf")
    assert not worker.learner.finite()


@pytest.mark.parametrize("shards", [((0, 1, 2, 3),), *SHARDS.values()], ids=str)
def test_numeric_14_every_trajectory_is_in_one_step_of_each_epoch(
    shards: tuple[tuple[int, ...], ...],
) -> None:
    workers = [make_worker(config(), blocks) for blocks in shards]
    whole = make_worker(config(), range(4)).collect(1)
    expected = [ids for epoch in range(EPOCHS) for ids in envs_of(whole, epoch)]
    found: list[Counter[int]] = [Counter() for _ in range(STEPS)]
    for worker in workers:
        rollout = worker.collect(1)
        parts = [ids for epoch in range(EPOCHS) for ids in envs_of(rollout, epoch)]
        for total, part in zip(found, parts, strict=True):
            total.update(part)
    # Which step an env goes into depends on nothing but its block, epoch and iteration.
    assert found == expected
    for epoch in range(EPOCHS):
        steps = found[epoch * MINI_BATCHES : (epoch + 1) * MINI_BATCHES]
        assert sum(steps, Counter()) == Counter(dict.fromkeys(range(4 * BLOCK), T))
    assert found[:MINI_BATCHES] != found[MINI_BATCHES : 2 * MINI_BATCHES]


def envs_of(rollout: Rollout, epoch: int) -> list[Counter[int]]:
    """How many samples of each env a rank puts into each mini-batch of an epoch."""
    ids = torch.from_numpy(rollout.env_ids).to(torch.float64).expand(T, -1)
    samples = MiniBatches(rollout, ids, ids, config().ppo, seed=1)
    batches = samples.epoch(iteration=1, epoch=epoch)
    return [Counter(int(i) for i in batch.returns.tolist()) for batch in batches]


def test_a_mini_batch_keeps_what_belongs_together() -> None:
    rollout = make_worker(config(), (1, 4)).collect(1)
    ids = torch.from_numpy(rollout.env_ids).to(torch.float64).expand(T, -1)
    steps = torch.arange(T, dtype=torch.float64)[:, None].expand(-1, 2 * BLOCK)
    samples = MiniBatches(rollout, steps, ids, config().ppo, seed=1)
    for batch in samples.epoch(iteration=1, epoch=0):
        column = torch.searchsorted(torch.from_numpy(rollout.env_ids), batch.returns.long())
        where = (batch.advantage.long(), column)
        assert torch.equal(batch.actor_obs, rollout.actor_obs[where])
        assert torch.equal(batch.critic_obs, rollout.critic_obs[where])
        assert torch.equal(batch.actions, rollout.actions[where])
        assert torch.equal(batch.mean_old, rollout.mean[where])
        assert torch.equal(batch.log_prob_old, rollout.log_prob[where])
        assert torch.equal(batch.value_old, rollout.values[where])


@pytest.mark.slow
def test_numeric_15_the_norm_is_that_of_the_global_gradient() -> None:
    union = one_iteration(config(), ((0, 1, 2, 3),))[0]
    ranks = one_iteration(config(), SHARDS["uneven"])
    for worker in ranks:
        assert worker.history[0]["gradient_norm"] == pytest.approx(
            union.history[0]["gradient_norm"], abs=1e-9
        )


@pytest.mark.slow
def test_numeric_15_no_limit_means_no_clipping() -> None:
    without = one_iteration(config(max_grad_norm=None), SHARDS["even"])[0]
    generous = one_iteration(config(max_grad_norm=1e9), SHARDS["even"])[0]
    tight = one_iteration(config(max_grad_norm=0.1), SHARDS["even"])[0]
    assert without.live()["optimiser/steps"].eq(STEPS).all()
    assert largest_difference(without, generous) == 0.0
    assert largest_difference(without, tight) > 1e-6


@pytest.mark.slow
def test_numeric_17_ranks_agree_on_every_bit_and_one_ulp_shows() -> None:
    hashes: dict[int, set[int]] = {}

    def after(iteration: int, rank: LockStepRank, worker: Worker) -> None:
        hashes.setdefault(iteration, set()).add(worker.packed().hash())

    worker = train(config(dtype="float32"), SHARDS["uneven"], 3, after=after)[0]
    assert [len(found) for found in hashes.values()] == [1, 1, 1]
    weight = worker.live()["model/actor.0.weight"]
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert worker.packed().hash() not in hashes[3]


def test_without_a_target_the_learning_rate_stays() -> None:
    worker = one_iteration(config(desired_kl=None, learning_rate=3e-4), SHARDS["even"])[0]
    assert set(worker.learning_rates) == {3e-4}


def test_collectives_and_failpoints_come_in_one_order_on_every_rank() -> None:
    group = LockStepGroup(3)
    workers = [make_worker(config(), blocks) for blocks in SHARDS["an empty rank"]]
    run_one(group, workers)
    each_step = ["mini_batch", "backward_begin", "backward_end", "between_steps"]
    each = [("mini_batch", "torch.float64", 3)] * STEPS
    for rank in group.ranks:
        assert rank.log[:-1] == [("advantage_moments", "torch.float64", 3), *each]
        assert rank.log[-1] == group.ranks[0].log[-1]  # the last collective, packed
        assert rank.hits == ["gae", *each_step * STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gae", "backward_begin", "backward_end", "between_steps"])
def test_redone_after_a_break_it_is_the_same_to_the_last_bit(where: str) -> None:
    settings = config(dtype="float32")
    unbroken = [make_worker(settings, blocks) for blocks in SHARDS["even"]]
    run_one(LockStepGroup(2), unbroken)

    def fault(name: str, before: int) -> None:
        if name == where and before == (0 if where == "gae" else 7):
            raise GroupBroken("injected")

    workers = [make_worker(settings, blocks) for blocks in SHARDS["even"]]
    rollouts = [worker.collect(1) for worker in workers]
    snapshots = [worker.packed() for worker in workers]
    group = LockStepGroup(2)
    group.ranks[1].on_hit = fault
    with pytest.raises(GroupBroken):
        run_one(group, workers, rollouts)
    group.ranks[1].on_hit = None
    for worker, snapshot in zip(workers, snapshots, strict=True):
        snapshot.load_into(worker.live())
    run_one(group, workers, rollouts)
    for worker, other in zip(workers, unbroken, strict=True):
        assert worker.packed().hash() == other.packed().hash()
        assert worker.history == other.history
