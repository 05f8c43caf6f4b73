"""SIGKILL of each rank at each point of the forming of a generation, with three workers."""

import pytest

from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import (
    Victim,
    assert_fired,
    assert_killed,
    assert_sound,
    kill,
    let_in,
    lose_last,
    recover,
)
from tests.faults.injectors.job import by_rank

pytestmark = [pytest.mark.slow, pytest.mark.faults]

THREE = ("--workers", "3", "--set", "env.budget=global", "--set", "env.num_envs=40")
JOIN_POINTS = (
    *("arrive", "group_init", "who_is_where", "broadcast", "hash_compare"),
    *("formed_before_mark", "formed_after_mark"),
)
FORCED_POINTS = (
    *("arrive", "group_init", "who_is_where", "hash_compare"),
    *("formed_before_mark", "formed_after_mark"),
)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", JOIN_POINTS)
def test_killed_while_a_newcomer_enters(jobs: Jobs, point: str, rank: int) -> None:
    """Ranks 0 and 1 are survivors, rank 2 is the newcomer."""
    with jobs.case(*THREE) as job:
        before = job.settle()
        first, newcomer, two = lose_last(job, before)
        job.arming.arm(f"{point}:{rank}=kill")
        let_in(newcomer)
        victim = newcomer if rank == 2 else Victim.of(by_rank(two, rank))
        assert_fired(job, victim)
        recover(job, before, [first, victim])
        assert_sound(job, before, init_broken=point == "group_init")


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_as_it_leaves_for_a_newcomer(jobs: Jobs, rank: int) -> None:
    with jobs.case(*THREE) as job:
        before = job.settle()
        first, newcomer, two = lose_last(job, before)
        job.arming.arm(f"leave_generation:{rank}=kill")
        let_in(newcomer)
        victim = Victim.of(by_rank(two, rank))
        assert_fired(job, victim)
        recover(job, before, [first, victim])
        assert_sound(job, before)


def test_the_third_of_three_is_killed_as_it_leaves_for_a_fourth(jobs: Jobs) -> None:
    with jobs.case("--workers", "4") as job:
        before = job.settle(4)
        first, newcomer, three = lose_last(job, before)
        job.arming.arm("leave_generation:2=kill")
        let_in(newcomer)
        victim = Victim.of(by_rank(three, 2))
        assert_fired(job, victim)
        recover(job, before, [first, victim])
        assert_sound(job, before)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", FORCED_POINTS)
def test_killed_during_the_recovery_from_a_kill(jobs: Jobs, point: str, rank: int) -> None:
    """Rank 0 is killed, and then one of the two survivors, while they form the next generation."""
    with jobs.case(*THREE) as job:
        before = job.settle()
        job.arming.arm(f"{point}:{rank}=kill")
        (first,) = kill(job, before, 0)
        victim = Victim.of(by_rank(before, rank + 1))
        assert_fired(job, victim)
        assert_killed(job, first)
        recover(job, before, [first, victim])
        assert_sound(job, before, init_broken=point == "group_init")
