"""How many envs each rank simulates, and which env blocks: pure arithmetic, checked beforehand.

An env block is a fixed group of ``block`` consecutive global env ids. Blocks are what is assigned,
moved, lost and weighted; a rank never holds part of one.
"""

import itertools
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from types import MappingProxyType
from typing import TypeVar

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import BudgetError

K = TypeVar("K")


def split(total: int, world_size: int, multiple: int) -> tuple[int, ...]:
    """Per-rank counts: positive multiples of ``multiple`` that add up to ``total``, as even as
    possible, larger ones at lower ranks. Raises `BudgetError` (a ValueError) naming the values."""
    asked = f"{total} envs over {world_size} ranks in multiples of {multiple}"
    if world_size < 1 or multiple < 1:
        raise BudgetError(f"{asked}: ranks and multiple must be at least 1")
    if total % multiple:
        raise BudgetError(
            f"{asked}: not a multiple; take {total // multiple * multiple} "
            f"or {(total // multiple + 1) * multiple}"
        )
    units = total // multiple
    if units < world_size:
        raise BudgetError(
            f"{asked}: {units} groups are fewer than {world_size} ranks, and every rank needs at least "
            f"{multiple}; take at least {world_size * multiple} envs or fewer ranks"
        )
    base, extra = divmod(units, world_size)
    return tuple((base + (rank < extra)) * multiple for rank in range(world_size))


def check(config: Config) -> None:
    """Refuse, before anything starts, every combination that some world size of the elastic range
    could not train with. Raises `BudgetError` naming the values and a remedy."""
    env, ppo = config.env, config.ppo
    if env.block < 1 or env.block % 8 or env.block % ppo.mini_batches:
        raise BudgetError(
            f"env.block = {env.block} must be a multiple of 8 and of ppo.mini_batches = "
            f"{ppo.mini_batches}: each block gives block/mini_batches trajectories to a mini-batch"
        )
    if env.block // ppo.mini_batches % ppo.micro_batches:
        raise BudgetError(
            f"ppo.micro_batches = {ppo.micro_batches} must divide env.block / ppo.mini_batches = "
            f"{env.block // ppo.mini_batches}: each block gives the same number of trajectories to every "
            f"micro-batch; take env.block = {ppo.mini_batches * ppo.micro_batches * 8} or fewer micro-batches"
        )
    low, high = world_size_range(config)
    if config.job.spares < 0:
        raise BudgetError(f"job.spares = {config.job.spares} must not be negative")
    for world_size in range(low, high + 1):
        try:
            counts = split(env.num_envs, world_size if env.budget == "global" else 1, env.block)
        except BudgetError as error:
            raise BudgetError(
                f"env.num_envs = {env.num_envs} (env.budget = {env.budget!r}, env.block = {env.block}): "
                f"{error}"
            ) from error
        # A global budget that a smaller world cannot hold is cut to its capacity: the deficit is shown.
        if (
            env.max_envs is not None
            and max(counts) > env.max_envs
            and (env.budget == "per_rank" or world_size == high)
        ):
            raise BudgetError(
                f"at world size {world_size}, the greatest, a rank would hold {max(counts)} envs, over "
                f"env.max_envs = {env.max_envs}; raise it, or take fewer envs or more workers"
            )


def world_size_range(config: Config) -> tuple[int, int]:
    """Least and greatest world size of the job. Raises `BudgetError` when empty."""
    low = config.job.min_workers
    high = config.node.workers if config.job.max_workers is None else config.job.max_workers
    if not 1 <= low <= high:
        raise BudgetError(
            f"job.min_workers = {low} must be at least 1 and at most the greatest world size, {high} "
            "(job.max_workers, or node.workers)"
        )
    return low, high


def assign_per_rank(
    held: Mapping[K, Sequence[int]],
    order: Sequence[K],
    blocks_each: int,
    most: Mapping[K, int] = MappingProxyType({}),
) -> dict[K, tuple[int, ...]]:
    """Per-rank budget: members keep their blocks, newcomers take the lowest free ids, the blocks of
    the lost lapse. ``held`` has the blocks of members that keep some; ``order`` is rank order;
    ``most`` says how many blocks a member can hold, where that is known."""
    taken = {b for key in order for b in held.get(key, ())}
    result: dict[K, tuple[int, ...]] = {}
    candidate = 0
    for key in order:
        share = min(blocks_each, most.get(key, blocks_each))
        mine = sorted(held.get(key, ()))[:share]
        while len(mine) < share:
            if candidate not in taken:
                mine.append(candidate)
                taken.add(candidate)
            candidate += 1
        result[key] = tuple(sorted(mine))
    return result


def assign_global(
    held: Mapping[K, Sequence[int]],
    order: Sequence[K],
    total_blocks: int,
    *,
    move: bool,
    most: Mapping[K, int] = MappingProxyType({}),
) -> dict[K, tuple[int, ...]]:
    """Global budget: blocks 0 … total-1 over the ranks in ``order``, as evenly as whole blocks allow.

    Members keep their blocks. Free ones go, lowest first, to whoever is furthest below its share (lower rank first).
    Only with ``move`` (planned changes) do members give blocks away, so that counts become those of
    `split`; a forced change never moves a block between survivors, which may hold a rollout of it.
    ``most`` says how many blocks a member can hold, where that is known: nobody holds more, the others
    hold what it cannot, and what nobody can hold is left out.
    """
    targets = _targets(order, total_blocks, most)
    mine = {key: sorted(b for b in held.get(key, ()) if b < total_blocks) for key in order}
    for key in order:
        del mine[key][targets[key] if move else most.get(key, total_blocks) :]
    taken = {b for blocks in mine.values() for b in blocks}
    free = (block for block in range(total_blocks) if block not in taken)
    needs = [(len(mine[key]) - targets[key], rank) for rank, key in enumerate(order)]
    heapify(needs)
    for block in itertools.islice(free, sum(targets.values()) - len(taken)):
        surplus, rank = needs[0]
        while len(mine[order[rank]]) >= most.get(order[rank], total_blocks):
            heappop(needs)  # it can hold no more
            surplus, rank = needs[0]
        mine[order[rank]].append(block)
        heapreplace(needs, (surplus + 1, rank))
    return {key: tuple(sorted(blocks)) for key, blocks in mine.items()}


def _targets(order: Sequence[K], total_blocks: int, most: Mapping[K, int]) -> dict[K, int]:
    """Even shares, those of members that can hold fewer cut to that, and the others' raised by it."""
    shares = dict(zip(order, split(total_blocks, len(order), 1), strict=True))
    full: dict[K, int] = {}
    while over := {key: most[key] for key in shares if shares[key] > most.get(key, total_blocks)}:
        full |= over
        rest, left = [key for key in shares if key not in over], total_blocks - sum(full.values())
        base, extra = divmod(left, max(1, len(rest)))
        shares = {key: base + (i < extra) for i, key in enumerate(rest)}
    return full | shares
