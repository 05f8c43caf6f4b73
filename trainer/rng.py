"""Keyed random numbers: the Philox4x32-10 counter-based generator, vectorised over keys.

Every draw is a pure function of (seed, purpose, id, iteration, step): no generator has state, so
nothing is skipped or repeated when envs move between workers or an iteration is redone, and a row
never depends on the rows drawn beside it.

Algorithm: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rallypoint.trainer.errors import TrainerError

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL: Final = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_SHIFT_32: Final = np.uint64(32)
_WORD_BOUND: Final = 2**32
_SEED_BOUND: Final = 2**56

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Purpose(IntEnum):
    """What a draw is for. Values are part of every stream's key: never reuse or renumber one."""

    POLICY_NOISE = 1
    MINI_BATCH = 2
    ENV_ASSIGN = 3
    ENV_RESET = 4
    ENV_COMMAND = 5
    TEACHER_ACTS = 6
    ENCODER = 7
    TERRAIN_LEVEL = 8


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 on arrays of 32-bit words held in uint64: ``counter`` [4, K], ``key`` [2];
    returns the four output words, [4, K]."""
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: two arrays of two rows each.
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS[:, None]
        even = (product >> _SHIFT_32)[::-1] ^ odd ^ key[:, None]
        odd = (product & _LOW_32)[::-1]
        key = (key + _WEYL) & _LOW_32
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(
    seed: int, purpose: Purpose, ids: ArrayLike, iteration: ArrayLike, step: ArrayLike, n: int
) -> NDArray[np.float64]:
    """Uniform draws in [0, 1) with 53 random bits: ``[..., n]`` float64.

    ``ids``, ``iteration`` and ``step`` are integers in [0, 2**32) that broadcast against each other
    to the leading shape (``[N]`` ids and two scalars give ``[N, n]``); the seed is in [0, 2**56).
    Raises `TrainerError` for values outside of that.
    """
    words = _words(seed, purpose, ids, iteration, step, (n + 1) // 2)
    # 27 bits of one word and 26 of the next make one float64.
    high = words[0::2] >> np.uint64(5)
    low = words[1::2] >> np.uint64(6)
    values = (high * 2.0**26 + low) * 2.0**-53
    return np.ascontiguousarray(_rows(values)[..., :n])


def normal(
    seed: int, purpose: Purpose, ids: ArrayLike, iteration: ArrayLike, step: ArrayLike, n: int
) -> NDArray[np.float64]:
    """Standard normal draws by the Box-Muller transform: ``[..., n]`` float64; arguments and errors
    as for `uniform`."""
    pairs = (n + 1) // 2
    draws = uniform(seed, purpose, ids, iteration, step, 2 * pairs)
    # Contiguous operands: numpy may take another code path, with other last bits, on strided ones.
    radius = np.sqrt(-2.0 * np.log(1.0 - np.ascontiguousarray(draws[..., 0::2])))
    angle = 2.0 * np.pi * np.ascontiguousarray(draws[..., 1::2])
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return np.ascontiguousarray(values.reshape(*draws.shape[:-1], 2 * pairs)[..., :n])


def policy_noise(
    seed: int,
    env_ids: NDArray[np.int64],
    iteration: int,
    rollout_steps: int,
    action_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Standard normal action noise of one rollout, ``[T, N, A]``, drawn in float64, then cast."""
    steps = np.arange(rollout_steps)[:, None]
    noise = normal(seed, Purpose.POLICY_NOISE, env_ids[None, :], iteration, steps, action_dim)
    return torch.from_numpy(noise).to(dtype)


def permutation(
    seed: int, block: ArrayLike, iteration: int, epoch: int, size: int
) -> NDArray[np.int64]:
    """A permutation of 0 … size-1 per env block: ``[size]`` for one block id, ``[B, size]`` for B.

    The order of ``size`` keyed 64-bit draws; equal draws, should they ever occur, go by index.
    """
    words = _words(seed, Purpose.MINI_BATCH, block, iteration, epoch, (size + 1) // 2)
    draws = _rows((words[0::2] << _SHIFT_32) | words[1::2])[..., :size]
    return np.argsort(draws, axis=-1, kind="stable").astype(np.int64)


def _words(
    seed: int,
    purpose: Purpose,
    ids: ArrayLike,
    iteration: ArrayLike,
    step: ArrayLike,
    blocks: int,
) -> NDArray[np.uint64]:
    """Four output words of each counter block, ``[4, *shape, blocks]`` with the shape that the key
    parts broadcast to. The counter is (block, step, id, iteration); the key holds the seed and the
    purpose, so that distinct keys never share a counter."""
    if not 0 <= seed < _SEED_BOUND:
        raise TrainerError(f"job.seed = {seed} must be at least 0 and below 2**56")
    parts = [_checked(name, part) for name, part in (("step", step), ("id", ids))]
    parts.append(_checked("iteration", iteration))
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    counter = np.empty((4, *shape, blocks), dtype=np.uint64)
    counter[0] = np.arange(blocks, dtype=np.uint64)
    for row, part in enumerate(parts, start=1):
        counter[row] = part[..., None]
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) << 8 | int(purpose)], dtype=np.uint64)
    return philox4x32(counter.reshape(4, -1), key).reshape(counter.shape)


def _checked(name: str, value: ArrayLike) -> NDArray[np.uint64]:
    array = np.asarray(value)
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < _WORD_BOUND):
        raise TrainerError(
            f"the {name} of a random draw must be in [0, 2**32); found {array.min()} … {array.max()}"
        )
    return array.astype(np.uint64)


def _rows(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """``[2, *shape, blocks]`` to ``[*shape, 2 * blocks]``, the two values of a block adjacent."""
    return np.moveaxis(values, 0, -1).reshape(*values.shape[1:-1], 2 * values.shape[-1])
