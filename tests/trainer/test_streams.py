"""Random streams belong to envs, not to ranks: whoever owns an env draws the same for it."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rallypoint.daemon.shared import envbudget
from rallypoint.trainer.elastic.envrows import env_ids
from rallypoint.trainer.rng import Purpose, policy_noise, uniform
from tests.fakes.training import BLOCK, config, make_worker

SEED, T, ACTIONS = 7, 4, 3
TOTAL_BLOCKS = 12


def memberships(seed: int, budget: str) -> Iterator[list[tuple[int, ...]]]:
    """Env blocks by rank, generation by generation, while workers join, leave and are lost. Survivors
    are renumbered whenever somebody of a lower rank goes."""
    chance = random.Random(seed)  # noqa: S311 - plays a history, no secret
    order, newest = [0, 1], 1
    held: dict[int, tuple[int, ...]] = {}
    for _ in range(30):
        forced = len(order) > 1 and chance.random() < 0.5
        if forced:
            order.remove(chance.choice(order))
        elif len(order) < 5:
            newest += 1
            order.append(newest)
        held = (
            envbudget.assign_per_rank(held, order, 2)
            if budget == "per_rank"
            else envbudget.assign_global(held, order, TOTAL_BLOCKS, move=not forced)
        )
        held = {key: held[key] for key in order}
        yield [held[key] for key in order]


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["per_rank", "global"])
@pytest.mark.parametrize("seed", range(3))
def test_numeric_33_streams_of_distinct_envs_never_meet_and_survivors_keep_theirs(
    budget: str, seed: int
) -> None:
    seen: dict[bytes, tuple[int, int]] = {}
    owners: dict[int, set[int]] = {}
    for iteration, ranks in enumerate(memberships(seed, budget), start=1):
        for rank, blocks in enumerate(ranks):
            ids = env_ids(blocks, BLOCK)
            noise = policy_noise(SEED, ids, iteration, T, ACTIONS, torch.float64)
            assert noise.shape == (T, len(ids), ACTIONS)
            starts = uniform(SEED, Purpose.ENV_RESET, ids, iteration, 0, ACTIONS)
            for row, env in enumerate(ids.tolist()):
                alone = policy_noise(SEED, ids[row : row + 1], iteration, T, ACTIONS, torch.float64)
                assert torch.equal(noise[:, row], alone[:, 0]), "nothing but the id decides"
                owners.setdefault(env, set()).add(rank)
                for stream in (noise[:, row].numpy().tobytes(), starts[row].tobytes()):
                    assert seen.setdefault(stream, (env, iteration)) == (env, iteration)
    assert any(len(ranks) > 1 for ranks in owners.values()), "no env ever changed its rank"


def test_numeric_33_a_rollout_draws_its_noise_once_by_env_iteration_and_step() -> None:
    settings = config()
    worker = make_worker(settings, (0, 3))
    for iteration in (5, 6):
        rollout = worker.collect(iteration)
        noise = policy_noise(settings.job.seed, worker.env.env_ids, iteration, 24, 2, torch.float64)
        assert torch.equal(rollout.actions, torch.addcmul(rollout.mean, rollout.std, noise))
        assert np.array_equal(rollout.env_ids, worker.env.env_ids)
