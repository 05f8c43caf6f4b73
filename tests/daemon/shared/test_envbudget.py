"""Splitting envs over ranks and handing out blocks: exact for every world size."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.config import Config, EnvSection, JobSection, NodeSection
from rallypoint.daemon.shared.errors import BudgetError


@given(st.integers(1, 60), st.integers(1, 16), st.sampled_from([1, 8, 24]))
def test_a_split_is_exact_even_and_larger_at_lower_ranks(
    units: int, world_size: int, multiple: int
) -> None:
    total = units * multiple
    if units < world_size:
        with pytest.raises(BudgetError, match=f"{total} envs"):
            envbudget.split(total, world_size, multiple)
        return
    counts = envbudget.split(total, world_size, multiple)
    assert sum(counts) == total
    assert all(count % multiple == 0 for count in counts)
    assert list(counts) == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= multiple


def test_numeric_32_what_does_not_divide_names_the_nearest_counts() -> None:
    with pytest.raises(BudgetError, match="take 96 or 104"):
        envbudget.split(100, 2, 8)


def test_per_rank_newcomers_take_the_lowest_free_blocks() -> None:
    held = {"a": (0, 1), "c": (4, 5)}
    assert envbudget.assign_per_rank(held, ["a", "c", "d"], 2) == {
        "a": (0, 1),
        "c": (4, 5),
        "d": (2, 3),
    }


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True),
    st.integers(6, 30),
    st.booleans(),
)
def test_global_blocks_are_all_held_once_through_any_change(
    before: list[str], after: list[str], blocks: int, move: bool
) -> None:
    held = envbudget.assign_global({}, before, blocks, move=True)
    result = envbudget.assign_global(held, after, blocks, move=move)
    assert sorted(b for mine in result.values() for b in mine) == list(range(blocks))
    if move:
        counts = [len(result[key]) for key in after]
        assert tuple(counts) == envbudget.split(blocks, len(after), 1)
    else:
        kept = [key for key in after if key in held]
        assert all(set(held[key]) <= set(result[key]) for key in kept)


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)),
    st.integers(6, 30),
    st.booleans(),
)
def test_nobody_holds_more_than_it_can_and_others_make_up_for_it(
    before: list[str], after: list[str], most: dict[str, int], blocks: int, move: bool
) -> None:
    held = envbudget.assign_global({}, before, blocks, move=True)
    result = envbudget.assign_global(held, after, blocks, move=move, most=most)
    given_out = sorted(b for mine in result.values() for b in mine)
    room = sum(most.get(key, blocks) for key in after)
    assert len(set(given_out)) == len(given_out) == min(blocks, room)
    assert all(len(mine) <= most.get(key, blocks) for key, mine in result.items())
    if not move:  # what a survivor can hold, it keeps: it may have a rollout of it
        for key in set(after) & set(held):
            kept = held[key][: most.get(key, blocks)]
            assert set(kept) <= set(result[key])
    shares = {key: len(mine) for key, mine in result.items()}
    if move:
        free = [shares[key] for key in after if shares[key] < most.get(key, blocks)]
        assert max(free, default=0) - min(free, default=0) <= 1
        assert max(shares.values()) <= max(free, default=blocks) + 1


def test_per_rank_a_member_holds_what_it_can() -> None:
    held = {"a": (0, 1), "c": (4, 5)}
    assert envbudget.assign_per_rank(held, ["a", "c", "d"], 2, {"c": 1, "d": 1}) == {
        "a": (0, 1),
        "c": (4,),
        "d": (2,),
    }


def test_numeric_32_the_whole_elastic_range_is_checked() -> None:
    env = EnvSection(budget="global", num_envs=64, max_envs=32)
    config = Config(env=env, node=NodeSection(workers=4), job=JobSection(min_workers=2))
    envbudget.check(config)
    envbudget.check(Config(env=env, node=NodeSection(workers=4)))  # at 1 there is a deficit
    small = replace(env, max_envs=8)
    with pytest.raises(
        BudgetError, match=r"at world size 4, the greatest, a rank would hold 16 .*= 8"
    ):
        envbudget.check(Config(env=small, node=NodeSection(workers=4)))
    with pytest.raises(BudgetError, match=r"job\.min_workers = 3"):
        envbudget.check(Config(job=JobSection(min_workers=3)))


def test_numeric_32_a_range_fits_just_when_each_of_its_world_sizes_does() -> None:
    def fits(num_envs: int, low: int, high: int) -> bool:
        env = EnvSection(budget="global", num_envs=num_envs)
        try:
            envbudget.check(Config(env=env, job=JobSection(min_workers=low, max_workers=high)))
        except BudgetError:
            return False
        return True

    def can_split(num_envs: int, world_size: int) -> bool:
        try:
            return sum(envbudget.split(num_envs, world_size, 8)) == num_envs
        except BudgetError:
            return False

    found = set()
    for num_envs, low, high in itertools.product(range(4, 52, 4), range(1, 8), range(1, 8)):
        expected = low <= high and all(can_split(num_envs, w) for w in range(low, high + 1))
        assert fits(num_envs, low, high) is expected, (num_envs, low, high)
        found.add(expected)
    assert found == {True, False}
