"""Each option of ``[ppo]`` does what it says, on one process or on simulated ranks."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.profiles import PROFILES
from rallypoint.trainer import update
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.envs.base import StepResult, VecEnv
from rallypoint.trainer.errors import EnvError
from rallypoint.trainer.minibatches import MiniBatch, MiniBatches
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.update import advantages_of
from tests.fakes.collectives import LockStepGroup, LockStepRank
from tests.fakes.gloo import train_over_gloo
from tests.fakes.training import BLOCK, Worker, config, largest_difference, make_worker, train

T = 24
SHARDS = ((1, 3), (0,), (2,))


def updated(settings: Config, iterations: int = 1) -> Worker:
    """One process with two env blocks."""
    return train(settings, [(0, 1)], iterations)[0]


# --- gradient accumulation ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("mini_batch_of", ["trajectories", "transitions"])
def test_numeric_03_accumulation_over_a_mini_batch_is_the_mini_batch(
    parts: int, mini_batch_of: str
) -> None:
    whole = updated(config(mini_batches=2, mini_batch_of=mini_batch_of))
    split = updated(config(mini_batches=2, mini_batch_of=mini_batch_of, micro_batches=parts))
    assert largest_difference(split, whole) <= 1e-12
    assert split.live()["optimiser/steps"].eq(5 * 2).all()
    assert split.history[0] == pytest.approx(whole.history[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["ddp", "ordered"])
def test_numeric_03_on_ranks_too(reduction: str) -> None:
    settings = config(mini_batches=2, reduction=reduction)
    union = train(settings, [range(4)], 2)[0]
    ranks = train(config(mini_batches=2, micro_batches=4, reduction=reduction), SHARDS, 2)
    assert largest_difference(ranks[0], union) <= 1e-10


@pytest.mark.slow
def test_numeric_03_ddp_reduces_once_a_mini_batch(tmp_path: Path) -> None:
    """Real DDP: what earlier micro-batches left is in the one reduction of the last."""
    settings = config(mini_batches=2, micro_batches=4)
    union = train(config(mini_batches=2), [range(4)], 2)[0].live()
    (ranks,) = train_over_gloo(settings, (((0, 1, 2), (3,)),), 2, tmp_path)
    for name, expected in union.items():
        torch.testing.assert_close(ranks[0][name], expected.detach(), rtol=0, atol=1e-10)
        assert torch.equal(ranks[1][name], ranks[0][name]), name


def test_micro_batches_are_parts_of_every_block() -> None:
    worker = make_worker(config(mini_batches=2, micro_batches=2), (0, 3))
    for batch in batches_of(worker.collect(1), worker, ids=True):
        for part in batch.split(2):
            assert Counter(part.returns.long().div(BLOCK, rounding_mode="floor").tolist()) == {
                0: 2 * T,
                3: 2 * T,
            }
            assert part.critic_obs is part.actor_obs


# --- mini-batches -------------------------------------------------------------------------------


def batches_of(
    rollout: Rollout, worker: Worker, *, epoch: int = 0, ids: bool = False
) -> list[MiniBatch]:
    """Mini-batches of an epoch; with ``ids`` the returns are env ids and the advantages steps."""
    advantages, returns = advantages_of(rollout, worker.ppo)
    if ids:
        returns = torch.from_numpy(rollout.env_ids).to(returns).expand(T, -1)
        advantages = torch.arange(T).to(returns)[:, None].expand_as(returns)
    samples = MiniBatches(rollout, advantages, returns, worker.ppo, seed=1)
    return list(samples.epoch(iteration=1, epoch=epoch))


@pytest.mark.parametrize("scope", ["block", "rank"])
@pytest.mark.parametrize("of", ["trajectories", "transitions"])
@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_numeric_14_every_sample_is_in_one_step_of_each_epoch(
    scope: str, of: str, every: str
) -> None:
    settings = config(mini_batch_of=of, permutation_scope=scope, permutation_every=every)
    worker = make_worker(settings, (0, 2))
    rollout = worker.collect(1)
    found = []
    for epoch in range(2):
        batches = batches_of(rollout, worker, epoch=epoch, ids=True)
        samples = [
            list(zip(b.returns.tolist(), b.advantage.tolist(), strict=True)) for b in batches
        ]
        assert [len(batch) for batch in samples] == [T * 2 * BLOCK // 4] * 4
        everything = itertools.product(rollout.env_ids.tolist(), range(T))
        assert Counter(itertools.chain(*samples)) == Counter(everything)
        whole = all(n == T for b in samples for n in Counter(env for env, _ in b).values())
        assert whole is (of == "trajectories")
        by_block = [Counter(int(env) // BLOCK for env, _ in batch) for batch in samples]
        if scope == "block":
            assert by_block == [{0: T * BLOCK // 4, 2: T * BLOCK // 4}] * 4
        found.append(samples)
    assert (found[0] == found[1]) is (every == "iteration")


@pytest.mark.parametrize("of", ["trajectories", "transitions"])
def test_a_block_is_dealt_alike_whoever_has_it(of: str) -> None:
    def dealt(blocks: tuple[int, ...]) -> list[set[tuple[float, float]]]:
        worker = make_worker(config(mini_batch_of=of), blocks)
        return [
            {
                (env, step)
                for env, step in zip(b.returns.tolist(), b.advantage.tolist(), strict=True)
                if env // BLOCK == 2
            }
            for b in batches_of(worker.collect(1), worker, ids=True)
        ]

    assert dealt((2,)) == dealt((0, 1, 2))


@pytest.mark.parametrize("scope", ["block", "rank"])
@pytest.mark.parametrize("of", ["trajectories", "transitions"])
def test_a_rank_without_envs_takes_part_with_nothing(scope: str, of: str) -> None:
    settings = config(mini_batch_of=of, permutation_scope=scope, micro_batches=2)
    workers = train(settings, [(0, 1), ()], 1)
    assert largest_difference(*workers) == 0.0
    assert workers[0].history[0]["skipped_steps"] == 0


# --- advantages ---------------------------------------------------------------------------------


def advantages_in(
    settings: Config, shards: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> list[list[Tensor]]:
    """The advantages in the mini-batches of the first epoch of an iteration, by rank."""
    found: dict[tuple[int, ...], list[Tensor]] = {blocks: [] for blocks in shards}

    class Noted(MiniBatches):
        def __init__(self, rollout: Rollout, *rest: Any) -> None:
            super().__init__(rollout, *rest)
            self._notes = found[rollout.blocks]

        def epoch(self, iteration: int, epoch: int) -> Iterator[MiniBatch]:
            for batch in super().epoch(iteration, epoch):
                if epoch == 0:
                    self._notes.append(batch.advantage)
                yield batch

    monkeypatch.setattr(update, "MiniBatches", Noted)
    train(settings, shards, 1)
    return [found[blocks] for blocks in shards]


def is_standard(parts: Sequence[Tensor], ddof: int = 1) -> bool:
    """Mean 0 and variance 1 over all of them together, to 1e-6."""
    x = torch.cat(list(parts))
    std = x.var(correction=ddof).sqrt().item()
    return abs(x.mean().item()) <= 1e-6 and abs(std - 1) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["global", "per_rank", "mini_batch"])
@pytest.mark.parametrize(
    "shards", [((0, 1, 2, 3),), ((3, 1, 2), (0,)), SHARDS, ((0,), (1,), (2,), (3,))]
)
def test_numeric_08_advantages_are_standardised_over_their_scope(
    scope: str, shards: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tuple(tuple(sorted(blocks)) for blocks in shards)
    ranks = advantages_in(config(advantage_scope=scope, epochs=1), shards, monkeypatch)
    if scope == "global":
        assert is_standard(list(itertools.chain(*ranks)))
    for rank in ranks:
        assert is_standard(rank) is (
            scope == "per_rank" or (scope == "global" and len(shards) == 1)
        )
        for batch in rank:
            assert is_standard([batch]) is (scope == "mini_batch")


def test_the_variance_of_advantages_may_be_the_biased_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for ddof in (0, 1):
        settings = config(advantage_ddof=ddof, epochs=1)
        (rank,) = advantages_in(settings, ((0,),), monkeypatch)
        assert is_standard(rank, ddof)
        assert torch.cat(rank).var(correction=ddof).item() == pytest.approx(1.0, abs=1e-7)


def test_time_outs_are_bootstrapped_by_the_value_that_is_asked_for() -> None:
    """The pointmass truncates at 50 steps, with envs at random phases: some within 24."""
    pre = make_worker(config(), (0, 1))
    final = make_worker(config(time_out_bootstrap="final_obs"), (0, 1))
    one, other = pre.collect(1), final.collect(1)
    assert one.final_values is None
    assert other.final_values is not None
    assert torch.equal(one.rewards, other.rewards)
    timed_out = other.truncated & ~other.terminated
    assert timed_out.any()
    delta = 0.99 * (other.final_values - other.values) * timed_out
    assert delta.abs().max() > 1e-3
    # The difference travels back through the trace, and starts where the time-out is.
    found = advantages_of(other, final.ppo)[0] - advantages_of(one, pre.ppo)[0]
    expected = torch.zeros_like(found)
    trace = torch.zeros_like(found[0])
    done = other.truncated | other.terminated
    for t in reversed(range(T)):
        trace = delta[t] + 0.99 * 0.95 * trace * ~done[t]
        expected[t] = trace
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_final_values_are_those_of_the_observation_before_the_reset() -> None:
    worker = make_worker(config(time_out_bootstrap="final_obs", rollout_steps=2), (0, 1))
    rollout = worker.collect(1)
    assert rollout.final_values is not None
    goes_on = ~(rollout.truncated | rollout.terminated)
    # Where no episode ended, the final observation is the next one.
    next_values = torch.cat([rollout.values[1:], rollout.last_values[None]])
    torch.testing.assert_close(rollout.final_values[goes_on], next_values[goes_on])


def test_an_env_without_final_observations_says_so() -> None:
    worker = make_worker(config(time_out_bootstrap="final_obs"), (0,))
    step = worker.env.step

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return getattr(worker.env, name)

        def step(self, actions: Tensor) -> StepResult:
            return replace(step(actions), final_obs=None)

    with pytest.raises(EnvError, match=r"no final observations.*time_out_bootstrap.*'pre_step'"):
        worker.learner.collect(cast(VecEnv, Silent()), 1, on_step=lambda t: None)


# --- learning rate, clipping, value loss --------------------------------------------------------


@pytest.mark.slow
def test_rank_0_sends_a_float32() -> None:
    rates = train(config(learning_rate_decision="rank_0"), SHARDS, 1)[0].learning_rates
    assert all(rate == torch.tensor(rate, dtype=torch.float32).item() for rate in rates)
    assert len(set(rates)) > 1
    alone = updated(config(learning_rate_decision="rank_0")).learning_rates
    assert alone == updated(config()).learning_rates
    assert any(rate != torch.tensor(rate, dtype=torch.float32).item() for rate in alone)


def test_the_kl_forms_differ_in_the_first_step() -> None:
    start = 1e-3
    exact = updated(config(learning_rate=start, kl_form="exact")).learning_rates
    sonic = updated(config(learning_rate=start, kl_form="sonic")).learning_rates
    assert exact[0] == start  # the KL of identical policies is exactly 0
    assert sonic[0] == start * 1.5


def gradient_norms(settings: Config) -> tuple[float, float]:
    """Norms of the policy's and the critic's gradient at the first step, as they enter the optimiser."""
    worker = make_worker(settings, (0,))
    groups = worker.learner.module.clip_groups()
    norms: list[tuple[float, float]] = []

    def note() -> None:
        one, other = (
            nn.utils.get_total_norm([p.grad for p in g if p.grad is not None]).item()
            for g in groups
        )
        norms.append((one, other))

    rollout = worker.collect(1)
    worker.learner.update(rollout, SingleProcess(), worker.learner.module, 1, note)
    return norms[0]


def test_numeric_15_clipped_together_or_each_by_its_own_norm() -> None:
    free = gradient_norms(config(max_grad_norm=None))
    joint = gradient_norms(config(max_grad_norm=0.1))
    separate = gradient_norms(config(max_grad_norm=0.1, grad_clip="separate"))
    assert min(free) > 0.1
    assert math.hypot(*joint) == pytest.approx(0.1, rel=1e-4)
    assert joint[0] / joint[1] == pytest.approx(free[0] / free[1], rel=1e-9)
    assert separate == pytest.approx((0.1, 0.1), rel=1e-4)


@pytest.mark.slow
def test_numeric_15_the_norm_is_measured_before_clipping() -> None:
    norms = {
        clip: updated(config(max_grad_norm=1e9, grad_clip=clip)).history[0]["gradient_norm"]
        for clip in ("joint", "separate")
    }
    assert norms["joint"] == pytest.approx(norms["separate"], rel=1e-9)


@pytest.mark.slow
def test_the_value_loss_may_go_unclipped() -> None:
    clipped, squared = (updated(config(clip=0.01, value_loss=v)) for v in ("clipped", "squared"))
    assert squared.history[0]["value_loss"] < clipped.history[0]["value_loss"]


# --- networks and normaliser --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["std", "log_std"])
@pytest.mark.parametrize("clamp", ["in_place", "forward"])
def test_numeric_01_noise_of_every_kind_trains_alike_on_ranks(noise: str, clamp: str) -> None:
    settings = config(noise=noise, std_clamp=clamp, std_bounds=(0.9, 1.01))
    union = train(settings, [range(4)], 2)[0]
    ranks = train(settings, SHARDS, 2)
    assert largest_difference(ranks[0], union) <= 1e-10
    std = union.learner.module.std()
    assert (std >= 0.9 - 1e-12).all()
    assert (std <= 1.01 + 1e-12).all()


def test_only_the_critic_may_be_normalised() -> None:
    worker = updated(config(normalise_actor=False, normaliser_prior=1), 2)
    assert worker.live()["normaliser/actor/count"].item() == 1 + 2 * T * 2 * BLOCK
    rollout = worker.collect(3)
    raw, seen = rollout.actor_obs, rollout.critic_obs
    assert seen is not raw
    moments = worker.live()["normaliser/actor/mean"], worker.live()["normaliser/actor/m2"]
    variance = moments[1] / worker.live()["normaliser/actor/count"]
    torch.testing.assert_close(seen, ((raw - moments[0]) / (variance + 1e-5).sqrt()).clamp(-5, 5))


@pytest.mark.slow
def test_numeric_20_a_prior_is_once_in_the_state_whatever_the_world_size() -> None:
    """Saved by one, loaded by W' ranks: counts do not change, and grow by what is new."""
    one = updated(config(normaliser_prior=1))
    saved = one.packed()
    before = one.live()["normaliser/actor/count"].item()
    assert before == 1 + T * 2 * BLOCK
    for shards in (((0, 1),), ((0,), (1,)), ((3,), (2,), (1,), (0,))):
        workers = [make_worker(config(normaliser_prior=1), blocks) for blocks in shards]
        for worker in workers:
            saved.load_into(worker.live())
            assert worker.live()["normaliser/actor/count"].item() == before

        def work(rank: LockStepRank, workers: Sequence[Worker] = workers) -> None:
            worker = workers[rank.rank]
            rollout = worker.collect(2)
            worker.update(rollout, rank, 2)
            worker.finish(rollout, rank)

        LockStepGroup(len(shards)).run(work)
        added = T * BLOCK * sum(map(len, shards))
        assert {w.live()["normaliser/actor/count"].item() for w in workers} == {before + added}


@pytest.mark.slow
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_profiles_train_on_ranks_and_learn_nothing_wrong(profile: str) -> None:
    """Each profile as it is, with small nets: finite, the same on all ranks, the LR in its bounds."""
    values = {
        path.removeprefix("ppo."): value
        for path, value in PROFILES[profile].items()
        if path.startswith("ppo.")
    }
    settings = config(dtype="float32", **(values | {"hidden": (16, 16), "critic_hidden": (16,)}))
    ranks = train(settings, SHARDS, 3)
    low, high = values["learning_rate_bounds"]
    for worker in ranks:
        assert worker.learner.finite()
        assert worker.packed().hash() == ranks[0].packed().hash()
        assert all(low <= rate <= high for rate in worker.learning_rates)
        assert worker.history[-1]["skipped_steps"] == 0
