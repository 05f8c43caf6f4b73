"""Who is where: every case of the decision, and the invariant that it never loses a committed iteration."""

import itertools

import msgspec
import pytest

from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey
from rallypoint.trainer.elastic.protocol import (
    Whereabouts,
    contributions,
    decide_source,
    majority,
)
from rallypoint.trainer.errors import TrainerError


def make_plan(world_size: int, *, formed: int = 3, restore: bool = False) -> Plan:
    return Plan(
        generation=5,
        kind="forced",
        cause="worker_lost",
        formed=formed,
        restore=restore,
        hold=False,
        commit_first=restore,
        budget_envs=16,
        members=tuple(
            PlannedWorker(WorkerKey("n", r, 1), r, "127.0.0.1", 1, (2 * r, 2 * r + 1))
            for r in range(world_size)
        ),
        survivors=(),
    )


def at(
    rank: int,
    *,
    formed: int = 4,
    prepared: int = 9,
    committed: int = 9,
    in_hand: tuple[int, ...] = (),
    checkpoint: tuple[int, int] | None = None,
) -> Whereabouts:
    return Whereabouts(WorkerKey("n", rank, 1), formed, prepared, committed, in_hand, checkpoint)


def newcomer(rank: int, checkpoint: tuple[int, int] | None = None) -> Whereabouts:
    return at(rank, formed=0, prepared=0, committed=0, checkpoint=checkpoint)


def test_somebody_committed_is_the_source() -> None:
    members = [at(0, prepared=10), at(1, prepared=10, committed=10), at(2)]
    decision = decide_source(make_plan(3), members)
    assert (decision.mode, decision.source, decision.iteration) == ("source", 1, 10)
    assert decision.receivers == {2}, "rank 0 holds the same result and applies it"


def test_all_prepared_apply_what_they_hold() -> None:
    decision = decide_source(make_plan(2), [at(0, prepared=10), at(1, prepared=10)])
    assert (decision.mode, decision.source, decision.iteration) == ("apply_held", 0, 10)
    assert decision.receivers == set()


def test_one_not_prepared_means_nobody_committed_so_all_roll_back() -> None:
    decision = decide_source(make_plan(2), [at(0, prepared=10), at(1)])
    assert (decision.mode, decision.source, decision.iteration) == ("roll_back", 0, 9)
    assert decision.receivers == set()


def test_nobody_prepared_redoes_the_iteration() -> None:
    decision = decide_source(make_plan(2), [at(0), at(1)])
    assert (decision.mode, decision.iteration) == ("source", 9)
    assert decision.receivers == set()


def test_numeric_34_a_newcomer_is_never_the_source_even_as_rank_0() -> None:
    decision = decide_source(make_plan(3), [newcomer(0), at(1), at(2)])
    assert decision.source == 1
    assert decision.receivers == {0}
    assert decision.survivors == {1, 2}


def test_numeric_34_who_formed_before_the_mark_is_a_newcomer_whatever_it_knows() -> None:
    stale = at(0, formed=2, prepared=99, committed=99)
    decision = decide_source(make_plan(2, formed=3), [stale, at(1)])
    assert decision.source == 1
    assert decision.receivers == {0}


def test_only_the_newest_lineage_counts() -> None:
    decision = decide_source(
        make_plan(2, formed=3), [at(0, formed=3, committed=12, prepared=12), at(1)]
    )
    assert decision.source == 1
    assert decision.iteration == 9


def test_without_survivors_the_newest_checkpoint_wins_by_generation_then_iteration() -> None:
    members = [newcomer(0, (3, 50)), newcomer(1, (4, 40)), newcomer(2, (4, 40)), newcomer(3)]
    decision = decide_source(make_plan(4, restore=True), members)
    assert (decision.mode, decision.source, decision.iteration) == ("restore", 1, 40)
    assert decision.receivers == {0, 2, 3}


def test_nothing_anywhere_starts_from_rank_0() -> None:
    decision = decide_source(make_plan(2, restore=True), [newcomer(0), newcomer(1)])
    assert (decision.mode, decision.source) == ("fresh", 0)
    assert decision.receivers == {1}


def test_a_plan_with_survivors_but_none_among_the_members_is_refused() -> None:
    with pytest.raises(TrainerError, match="generation 5 was planned with survivors"):
        decide_source(make_plan(2), [newcomer(0), newcomer(1)])


@pytest.mark.parametrize("states", list(itertools.product([(9, 9), (10, 9), (10, 10)], repeat=3)))
def test_a_committed_iteration_is_never_given_up(states: tuple[tuple[int, int], ...]) -> None:
    """All mixes that can occur: somebody committed only if everybody is prepared."""
    if any(c == 10 for _, c in states) and any(p == 9 for p, _ in states):
        return  # the barrier makes this impossible
    members = [at(r, prepared=p, committed=c) for r, (p, c) in enumerate(states)]
    decision = decide_source(make_plan(3), members)
    if any(c == 10 for _, c in states):
        assert decision.iteration == 10
    source = members[decision.source]
    assert decision.iteration in (source.committed, source.prepared)
    for rank, member in enumerate(members):
        if rank not in decision.receivers:
            assert decision.iteration in (member.committed, member.prepared)


def test_rollouts_in_hand_are_used_and_no_env_enters_twice() -> None:
    plan = make_plan(3)
    members = [at(0, in_hand=(0, 1)), at(1, in_hand=(2, 3, 4)), newcomer(2)]
    decision = decide_source(plan, members)
    assert contributions(plan, members, decision) == ((0, 1), (2, 3, 4), (5,))


def test_a_rollout_of_an_iteration_that_is_committed_now_counts_no_more() -> None:
    plan = make_plan(2)
    members = [at(0, prepared=10, in_hand=(0, 1)), at(1, prepared=10, in_hand=(2, 3))]
    decision = decide_source(plan, members)
    assert contributions(plan, members, decision) == ((0, 1), (2, 3)), "as planned, collected anew"
    moved = [at(0, prepared=10, in_hand=(7,)), at(1, prepared=10, in_hand=(2, 3))]
    assert contributions(plan, moved, decide_source(plan, moved)) == ((0, 1), (2, 3))


def test_majority_and_tie() -> None:
    assert majority([7, 8, 8], [0, 1, 2]) == (1, frozenset({0}))
    assert majority([7, 8], [0, 1]) == (0, frozenset({1}))
    assert majority([7, 8, 7], [1, 2]) == (1, frozenset({0, 2})), "newcomer 0 has no vote"


def test_rule_11_a_job_with_progress_never_starts_from_scratch() -> None:
    resumed = msgspec.structs.replace(make_plan(2, restore=True), resumes=True)
    with pytest.raises(TrainerError, match="not starting from scratch"):
        decide_source(resumed, [newcomer(0), newcomer(1)])
