"""``[ppo] reduction = "ordered"``: no bit depends on how env blocks are spread over ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.registry import PackedState
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.ordered import BlockReduction
from rallypoint.trainer.rollout import join
from tests.fakes.collectives import LockStepGroup, LockStepRank
from tests.fakes.training import BLOCK, Worker, config, largest_difference, make_worker, train

Shards = Sequence[Sequence[int]]

ONE: Shards = ((0, 1, 2, 3, 4),)
TWO: Shards = ((3, 4), (0, 1, 2))
THREE: Shards = ((1,), (0, 3), (2, 4))
EPISODES = ("rows", "returns", "lengths")
FOUR: Shards = ((4,), (), (0, 1, 2), (3,))


def ordered(task: str, dtype: Literal["float32", "float64"], epochs: int = 5) -> Config:
    return config(task=task, dtype=dtype, reduction="ordered", epochs=epochs)


def run(settings: Config, schedule: Sequence[Shards]) -> tuple[list[str], list[dict[str, float]]]:
    """One iteration for each entry, whose ranks are made anew from the state and the env rows before:
    SHA-256 of the whole state after each, and its figures."""
    state: PackedState | None = None
    rows: dict[str, NDArray[np.float64]] = {}
    hashes: list[str] = []
    history: list[dict[str, float]] = []
    for iteration, shards in enumerate(schedule, start=1):
        workers = [make_worker(settings, blocks) for blocks in shards]
        for worker in workers:
            if state is not None:
                state.load_into(worker.live())
                ids = worker.env.env_ids
                worker.env.load_rows(ids, {name: values[ids] for name, values in rows.items()})
        iterate(workers, iteration)
        assert len({worker.packed().hash() for worker in workers}) == 1
        state = workers[0].packed()
        rows = merged_rows(workers)
        hashes.append(hashlib.sha256(state.buffer.numpy().tobytes()).hexdigest())
        history.append(workers[0].history[-1])
    return hashes, history


def iterate(workers: Sequence[Worker], iteration: int) -> None:
    def work(rank: LockStepRank) -> None:
        worker = workers[rank.rank]
        rollout = worker.collect(iteration)
        worker.update(rollout, rank, iteration)
        worker.finish(rollout, rank)

    LockStepGroup(len(workers)).run(work)


def merged_rows(workers: Sequence[Worker]) -> dict[str, NDArray[np.float64]]:
    """Rows of all envs, by id."""
    count = sum(len(worker.env.env_ids) for worker in workers)
    merged: dict[str, NDArray[np.float64]] = {}
    for worker in workers:
        for name, values in worker.env.rows().items():
            merged.setdefault(name, np.zeros((count, *values.shape[1:])))
            merged[name][worker.env.env_ids] = values
    return merged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "dtype", "iterations"),
    [
        ("pointmass", "float32", 6),
        ("pointmass", "float64", 4),
        ("quadruped-velocity", "float32", 3),
        ("humanoid-track", "float32", 2),
    ],
)
def test_numeric_05_every_world_size_and_sequence_gives_the_same_bits(
    task: str, dtype: Literal["float32", "float64"], iterations: int
) -> None:
    settings = ordered(task, dtype)
    constant = run(settings, [ONE] * iterations)
    assert run(settings, [TWO] * iterations) == constant
    changing = [FOUR, TWO, FOUR, THREE, ONE, FOUR][:iterations]
    assert run(settings, changing) == constant


@pytest.mark.slow
def test_plain_sums_are_not_that_exact() -> None:
    """Or the test above would show nothing."""
    settings = config(dtype="float32")
    assert run(settings, [ONE] * 2)[0] != run(settings, [THREE] * 2)[0]


@pytest.mark.slow
def test_numeric_31_it_is_the_same_algorithm() -> None:
    plain = train(config(), THREE, 10)[0]
    exact = train(ordered("pointmass", "float64"), THREE, 10)[0]
    assert largest_difference(plain, exact) <= 1e-10
    for figures, expected in zip(exact.history, plain.history, strict=True):
        assert figures == pytest.approx(expected, rel=1e-9)


def test_two_ranks_with_the_same_block_are_an_error() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(TrainerError, match="two ranks"):
        LockStepGroup(2).run(lambda rank: BlockReduction(rank, module, (rank.rank, 1)))


def test_no_block_anywhere_sums_to_zero() -> None:
    reduction = BlockReduction(SingleProcess(), torch.nn.Linear(1, 1), ())
    assert reduction.gather("any", [torch.ones(3)]) == []
    assert reduction.begin_sum("any", [torch.ones(3)])().tolist() == [0.0] * 3


def test_a_rollout_by_block_is_the_rollout() -> None:
    whole = make_worker(ordered("pointmass", "float64"), (1, 4)).collect(1)
    parts = whole.by_block()
    assert [part.blocks for part in parts] == [(1,), (4,)]
    assert torch.equal(torch.cat([part.actions for part in parts], dim=1), whole.actions)
    assert sum(part.env_steps for part in parts) == whole.env_steps
    returns = torch.cat([part.episode_returns for part in parts])
    assert returns.sort().values.equal(whole.episode_returns.sort().values)
    assert all((part.episode_rows < BLOCK).all() for part in parts)
    merged = parts[0].obs_moments["actor"].merge(parts[1].obs_moments["actor"])
    torch.testing.assert_close(merged.m2, whole.obs_moments["actor"].m2)
    assert all(part.actor_obs.is_contiguous() for part in parts)


@pytest.mark.parametrize("task", ["pointmass", "humanoid-track"])
def test_parts_joined_in_any_order_are_the_rollout(task: str) -> None:
    """Every field, so that none is forgotten."""
    settings = config(
        task=task, dtype="float32", reduction="ordered", time_out_bootstrap="final_obs"
    )
    whole = make_worker(settings, (0, 3, 5)).collect(1)
    first, second, third = whole.by_block()
    joined = join(join(third, first), second)
    assert joined.blocks == whole.blocks
    for field in fields(whole):
        found, expected = getattr(joined, field.name), getattr(whole, field.name)
        if isinstance(expected, torch.Tensor) and not field.name.startswith("episode_"):
            assert torch.equal(found, expected), field.name
        elif isinstance(expected, np.ndarray):
            assert np.array_equal(found, expected)
    assert (joined.bins is None) == (task == "pointmass")
    ended = [
        sorted(zip(*(getattr(r, f"episode_{n}").tolist() for n in EPISODES), strict=True))
        for r in (joined, whole)
    ]
    assert ended[0] == ended[1]
    for name, sums in whole.figures.items():
        assert torch.equal(joined.figures[name], sums)
    for found, expected in zip(joined.block_moments, whole.block_moments, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[g].m2, expected[g].m2) for g in expected)
    for group, moments in whole.obs_moments.items():
        torch.testing.assert_close(joined.obs_moments[group].m2, moments.m2)
