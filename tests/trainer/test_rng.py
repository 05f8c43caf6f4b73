"""Keyed random numbers: known answers, distinct streams, independence of what is drawn beside."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.rng import (
    Purpose,
    normal,
    permutation,
    philox4x32,
    policy_noise,
    uniform,
)

PI_DIGITS = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*PI_DIGITS, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_known_answers(
    counter: list[int], key: list[int], expected: str
) -> None:
    columns = np.array([counter, counter], dtype=np.uint64).T
    words = philox4x32(columns, np.array(key, dtype=np.uint64))
    for column in words.T:
        assert " ".join(f"{int(word):08x}" for word in column) == expected


def test_draws_have_the_moments_of_their_distribution() -> None:
    ids = np.arange(20_000)
    flat = uniform(1, Purpose.ENV_RESET, ids, 1, 0, 5)
    assert flat.shape == (20_000, 5)
    assert flat.min() >= 0.0
    assert flat.max() < 1.0
    assert abs(flat.mean() - 0.5) < 0.004
    assert abs(flat.var() - 1 / 12) < 0.002
    bell = normal(1, Purpose.POLICY_NOISE, ids, 1, 0, 5)
    assert abs(bell.mean()) < 0.01
    assert abs(bell.var() - 1.0) < 0.02
    assert abs((bell**4).mean() - 3.0) < 0.15
    correlation = np.corrcoef(np.concatenate([flat, bell], axis=1).T)
    assert np.abs(correlation - np.eye(10)).max() < 0.03


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(
        st.tuples(
            st.integers(0, 2**56 - 1),
            st.sampled_from(Purpose),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
        ),
        min_size=2,
        max_size=6,
        unique=True,
    )
)
def test_streams_of_distinct_keys_differ(keys: list[tuple[int, Purpose, int, int, int]]) -> None:
    draws = [tuple(uniform(*key, 4).tolist()) for key in keys]
    assert len(set(draws)) == len(keys)


def test_neighbouring_keys_share_no_draw() -> None:
    ids, iterations, steps = np.ogrid[0:6, 0:5, 0:4]
    draws = np.stack(
        [
            uniform(seed, purpose, ids, iterations, steps, 7)
            for seed in (0, 1, 2**32)
            for purpose in Purpose
        ]
    )
    assert draws.shape == (3 * len(Purpose), 6, 5, 4, 7)
    assert np.unique(draws).size == draws.size


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    n=st.integers(1, 13),
    data=st.data(),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    ids: list[int], n: int, data: st.DataObject
) -> None:
    together_uniform = uniform(7, Purpose.ENV_RESET, ids, 3, 5, n)
    together_normal = normal(7, Purpose.ENV_RESET, ids, 3, 5, n)
    chosen = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10))
    part = [ids[i] for i in chosen]
    assert np.array_equal(uniform(7, Purpose.ENV_RESET, part, 3, 5, n), together_uniform[chosen])
    assert np.array_equal(normal(7, Purpose.ENV_RESET, part, 3, 5, n), together_normal[chosen])
    longer = normal(7, Purpose.ENV_RESET, ids, 3, 5, n + 3)
    assert np.array_equal(longer[:, :n], together_normal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_policy_noise_is_one_stream_per_env_and_step(dtype: torch.dtype) -> None:
    ids = np.array([3, 4, 2**31, 2**31 + 5], dtype=np.int64)
    noise = policy_noise(5, ids, 12, 6, 3, dtype)
    assert noise.shape == (6, 4, 3)
    assert noise.dtype == dtype
    for t in range(6):
        row = normal(5, Purpose.POLICY_NOISE, ids, 12, t, 3)
        assert torch.equal(noise[t], torch.from_numpy(row).to(dtype))
    assert torch.equal(policy_noise(5, ids[1:3], 12, 6, 3, dtype), noise[:, 1:3])
    assert not torch.equal(policy_noise(5, ids, 13, 6, 3, dtype), noise)
    assert policy_noise(5, ids[:0], 12, 6, 3, dtype).shape == (6, 0, 3)


@pytest.mark.parametrize("size", [1, 8, 15, 64])
def test_permutations_are_keyed_per_block(size: int) -> None:
    blocks = np.array([0, 1, 7, 4000])
    together = permutation(1, blocks, 9, 2, size)
    assert together.shape == (4, size)
    assert together.dtype == np.int64
    assert np.array_equal(np.sort(together, axis=1), np.tile(np.arange(size), (4, 1)))
    for row, block in zip(together, blocks, strict=True):
        assert np.array_equal(permutation(1, int(block), 9, 2, size), row)
    assert permutation(1, blocks[:0], 9, 2, size).shape == (0, size)


def test_permutations_differ_by_key_and_are_fair() -> None:
    base = permutation(1, np.arange(4000), 1, 0, 8)
    for other in (
        permutation(2, np.arange(4000), 1, 0, 8),
        permutation(1, np.arange(4000), 2, 0, 8),
        permutation(1, np.arange(4000), 1, 1, 8),
    ):
        assert (base == other).all(axis=1).mean() < 0.01
    # Each index is at each place equally often: 500 of 4000, standard deviation 21.
    counts = np.stack([(base == index).sum(axis=0) for index in range(8)])
    assert np.abs(counts - 500).max() < 110


@pytest.mark.parametrize(
    ("seed", "env_id", "iteration", "step", "named"),
    [
        (-1, 0, 0, 0, "job.seed = -1"),
        (2**56, 0, 0, 0, "job.seed"),
        (1, -1, 0, 0, "id"),
        (1, 2**32, 0, 0, "id"),
        (1, 0, 2**32, 0, "iteration"),
        (1, 0, 0, -5, "step"),
    ],
)
def test_key_parts_out_of_range_are_refused_by_name(
    seed: int, env_id: int, iteration: int, step: int, named: str
) -> None:
    with pytest.raises(TrainerError, match=named):
        uniform(seed, Purpose.ENV_RESET, [env_id], iteration, step, 1)
