"""The leader when nobody is gone: joins, drains, the formed mark, env blocks, the end of a job."""

from typing import Any

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.records import MemberRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from tests.fakes.membership import (
    LeaderScript,
    job,
    key,
    leader_policy,
    member,
    plan,
    slot_record,
    trained,
)


def _elect(
    present: Plan, *members: MemberRecord, formed: int | None = None, **policy: object
) -> LeaderScript:
    """A leader of a job with this plan, formed unless it says otherwise."""
    record = job(
        formed=present.generation if formed is None else formed, iteration=20, restore_generation=1
    )
    script = LeaderScript(leader_policy(**policy))
    return script.elect(*members, plan=present, job_record=record)


def _of(generation: int, *keys: WorkerKey, **fields: object) -> Plan:
    """A plan all of whose members survived."""
    return plan(generation, *keys, survivors=keys, **fields)  # type: ignore[arg-type]


# --- the end of the job ----------------------------------------------------------------------------


def test_a_plan_carries_the_end_of_the_job_and_a_new_end_is_a_planned_change() -> None:
    script = _elect(_of(3, key(0)), member(trained(0, 3), slot_record(1)), iterations=40)
    script.wait()
    joined = script.published
    assert (joined.cause, joined.iterations, joined.env_steps) == ("join", 40, None)
    assert not joined.reached(39, 10**9)
    assert joined.reached(40, 0)
    present = _of(3, key(0), key(1), iterations=40)
    moved = _elect(present, member(trained(0, 3), trained(1, 3)), iterations=90, env_steps=5000)
    published = moved.published
    assert (published.kind, published.cause, moved.ranks) == ("planned", "scale", [key(0), key(1)])
    assert (published.iterations, published.env_steps) == (90, 5000)
    assert published.reached(41, 5000)
    same = _elect(present, member(trained(0, 3), trained(1, 3)), iterations=40)
    assert same.all_of(act.PublishPlan) == []


# --- joins (4.4) -----------------------------------------------------------------------------------


def test_rule_04_newcomers_within_the_window_enter_together() -> None:
    script = _elect(
        _of(3, key(0)), member(trained(0, 3), slot_record(1), slot_record(2, "warming"))
    )
    assert script.all_of(act.SetTimer) == [act.SetTimer(101.0)]
    script.now = 100.8
    script.see(member(trained(0, 3), slot_record(1), slot_record(2)))
    assert script.all_of(act.PublishPlan) == []
    script.wait()
    assert script.now == 101.0
    joined = script.published
    assert (joined.kind, joined.cause, joined.starts) == ("planned", "join", "safe_point")
    assert (script.ranks, joined.survivors) == ([key(0), key(1), key(2)], (key(0),))
    (probe,) = script.all_of(act.ProbeMembers)
    assert probe.targets == (key(1), key(2))


def test_rule_04_nobody_joins_before_the_present_plan_has_formed() -> None:
    script = _elect(_of(4, key(0)), member(trained(0, 3), slot_record(1)), formed=3)
    script.now = 110.0
    script.feed(ev.TimerFired())
    assert script.all_of(act.PublishPlan) == []
    script.see(member(trained(0, 4), slot_record(1)))
    assert script.all_of(act.MarkFormed) == [act.MarkFormed(4)]
    assert script.all_of(act.PublishPlan) == []
    script.feed(ev.JobChanged(job(formed=4)))
    assert script.ranks == [key(0), key(1)]


def test_joins_stop_at_max_workers() -> None:
    members = member(trained(0, 3), slot_record(1, ready_order=9), slot_record(2, ready_order=5))
    script = _elect(_of(3, key(0)), members, max_workers=2).wait()
    assert script.ranks == [key(0), key(2)]
    full = _elect(
        _of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3), slot_record(2)), max_workers=2
    )
    assert full.all_of(act.PublishPlan) == []
    assert "the job has its 2 workers" in full.said
    assert full.state.timer_at_s is None


def test_a_newcomer_that_does_not_answer_keeps_the_others_out_of_nothing() -> None:
    script = _elect(_of(3, key(0)), member(trained(0, 3), slot_record(1), slot_record(2)))
    script.silent = {key(1)}
    assert script.wait().ranks == [key(0), key(2)]
    alone = _elect(_of(3, key(0)), member(trained(0, 3), slot_record(1)))
    alone.silent = {key(1)}
    alone.wait()
    assert alone.all_of(act.PublishPlan) == []
    assert alone.all_of(act.SetTimer) == [act.SetTimer(102.0)]


def test_rule_04_who_formed_an_older_generation_is_a_newcomer() -> None:
    members = member(trained(0, 3), trained(1, 2, state="ready"))
    script = _elect(_of(3, key(0)), members).wait()
    assert (script.ranks, script.published.survivors) == ([key(0), key(1)], (key(0),))


def test_a_newcomer_that_dies_before_anybody_entered_is_superseded_at_once() -> None:
    pending = plan(4, key(0), key(1), key(2), kind="planned", cause="join", survivors=(key(0),))
    script = _elect(pending, member(trained(0, 3), slot_record(1), slot_record(2)), formed=3)
    script.see(member(trained(0, 3), slot_record(1, "starting", incarnation=2), slot_record(2)))
    after = script.published
    assert (after.generation, after.kind, after.cause) == (5, "planned", "join")
    assert script.ranks == [key(0), key(2)]


def test_rule_04_a_survivor_that_dies_before_a_join_forces_a_plan_without_newcomers() -> None:
    pending = plan(4, key(0), key(1), key(2), kind="planned", survivors=(key(0), key(1)))
    script = _elect(pending, member(trained(0, 3), trained(1, 3), slot_record(2)), formed=3)
    script.see(member(trained(0, 3), slot_record(1, "lost"), slot_record(2))).wait()
    assert (script.published.kind, script.ranks) == ("forced", [key(0)])


def test_a_newcomer_that_dies_while_its_generation_forms_forces_a_plan() -> None:
    pending = plan(4, key(0), key(1), key(2), kind="planned", survivors=(key(0), key(1)))
    members = member(trained(0, 4), trained(1, 3), slot_record(2, "lost"))
    script = _elect(pending, members, formed=3)
    assert script.all_of(act.PublishPlan) == []
    assert (script.wait().published.kind, script.ranks) == ("forced", [key(0), key(1)])


def test_members_that_formed_a_generation_which_was_superseded_unmarked_are_released() -> None:
    """They wait for a mark that cannot come, so the safe point of the planned change cannot either."""
    pending = plan(5, key(0), key(1), kind="planned", survivors=(key(0), key(1)))
    script = _elect(pending, member(trained(0, 4), trained(1, 4)), formed=3).wait()
    assert (script.published.kind, script.ranks) == ("forced", [key(0), key(1)])


def test_rule_03_a_planned_change_keeps_ranks_of_survivors_and_adds_newcomers_after() -> None:
    present = _of(3, key(1, 1, "b"), key(0))
    script = _elect(
        present,
        member(trained(0, 3), slot_record(1)),
        member(slot_record(0), trained(1, 3), node_name="b"),
    ).wait()
    assert script.ranks == [key(1, 1, "b"), key(0), key(1), key(0, 1, "b")]


# --- drain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["drain", "notice"])
def test_rule_06_a_draining_node_is_planned_out_at_once(cause: str) -> None:
    keys = (key(0, 1, "b"), key(0), key(1))
    script = _elect(
        _of(3, *keys), member(trained(0, 3), trained(1, 3)), member(trained(0, 3), node_name="b")
    )
    leaving = member(trained(0, 3), node_name="b", draining=True, drain_cause=cause)
    script.see(member(trained(0, 3), trained(1, 3)), leaving)
    after = script.published
    assert (after.kind, after.cause) == ("planned", cause)
    assert script.ranks == [key(0), key(1)]


def test_rule_06_the_only_holder_of_state_is_not_planned_out() -> None:
    draining = member(trained(0, 3), draining=True, drain_cause="drain")
    script = _elect(_of(3, key(0)), draining)
    assert script.all_of(act.PublishPlan) == []
    assert "the only live state" in script.said
    script.see(draining, member(slot_record(0), node_name="b")).wait()
    assert script.ranks == [key(0), key(0, 1, "b")]
    both = script.published
    script.feed(ev.PlanChanged(both))
    other = member(trained(0, 4), node_name="b")
    script.see(member(trained(0, 4), draining=True, drain_cause="drain"), other)
    script.feed(ev.JobChanged(job(formed=4)))
    assert (script.published.cause, script.ranks) == ("drain", [key(0, 1, "b")])


def test_a_spare_takes_over_at_once_when_all_who_train_leave() -> None:
    leaving: dict[str, Any] = {"draining": True, "drain_cause": "notice"}
    spare = member(slot_record(0), node_name="b")
    script = _elect(_of(3, key(0)), member(trained(0, 3)), spare, spares=1)
    assert "kept as spares" in script.said
    script.see(member(trained(0, 3), **leaving), spare)
    assert (script.published.cause, script.ranks) == ("join", [key(0), key(0, 1, "b")])
    script.feed(ev.PlanChanged(script.published))
    script.see(member(trained(0, 4), **leaving), member(trained(0, 4), node_name="b"))
    script.feed(ev.JobChanged(job(formed=4)))
    assert (script.published.cause, script.ranks) == ("notice", [key(0, 1, "b")])


def test_a_forced_plan_leaves_draining_workers_out_when_others_live() -> None:
    keys = (key(0, 1, "b"), key(0), key(1))
    script = _elect(
        _of(4, *keys),
        member(trained(0, 3), trained(1, 3)),
        member(trained(0, 3), node_name="b"),
        formed=3,
    )
    script.see(
        member(trained(0, 3), slot_record(1, "lost")),
        member(trained(0, 3), node_name="b", draining=True, drain_cause="drain"),
    ).wait()
    assert script.ranks == [key(0)]


def test_no_worker_of_a_draining_node_joins() -> None:
    script = _elect(
        _of(3, key(0)),
        member(trained(0, 3)),
        member(slot_record(0), node_name="b", draining=True, drain_cause="drain"),
    )
    assert script.orders == ()


# --- formed mark and commit_first ------------------------------------------------------------------


def test_the_mark_comes_once_every_member_of_exactly_this_plan_has_formed_it() -> None:
    present = _of(4, key(0), key(1))
    script = _elect(present, member(trained(0, 4), trained(1, 3)), formed=3)
    assert script.orders == ()
    script.see(member(trained(0, 4), trained(1, 4)))
    assert list(script.orders) == [act.MarkFormed(4)]
    script.see(member(trained(0, 4), trained(1, 4), slot_record(2, "warming")))
    assert script.orders == ()


def test_a_generation_one_of_whose_members_died_is_never_marked() -> None:
    script = _elect(_of(4, key(0), key(1)), member(trained(0, 4), trained(1, 3)), formed=3)
    script.see(member(trained(0, 4), slot_record(1, "starting", incarnation=2)))
    assert script.all_of(act.MarkFormed) == []


@pytest.mark.parametrize(
    ("checkpoint", "first"), [((2, 50), True), ((3, 40), False), ((5, 41), False)]
)
def test_commit_first_stays_until_a_checkpoint_has_the_restoring_number(
    checkpoint: tuple[int, int], first: bool
) -> None:
    restoring = plan(3, key(0), key(1), restore=True, commit_first=True)
    slots = [trained(slot, 3, checkpoint=checkpoint) for slot in (0, 1)]
    script = LeaderScript(leader_policy()).elect(
        member(*slots), plan=restoring, job_record=job(formed=3, restore_generation=3)
    )
    script.see(member(slots[0], slot_record(1, "lost"))).wait()
    assert script.published.commit_first is first


# --- env blocks ------------------------------------------------------------------------------------


def _blocks(script: LeaderScript) -> dict[str, tuple[int, ...]]:
    return {str(m.key): m.blocks for m in script.published.members}


def test_per_rank_survivors_keep_their_blocks_and_newcomers_take_the_lowest_free() -> None:
    members = member(trained(0, 3, blocks=(4, 5)), slot_record(1), slot_record(2))
    script = _elect(_of(3, key(0)), members).wait()
    assert _blocks(script) == {"a/0#1": (4, 5), "a/1#1": (0, 1), "a/2#1": (2, 3)}
    assert script.published.budget_envs == 16


def test_global_a_forced_change_moves_no_block_between_survivors() -> None:
    held = {0: (0, 1), 1: (2, 3), 2: (4, 5)}
    script = _elect(
        _of(3, key(0), key(1), key(2)),
        member(*(trained(slot, 3, blocks=b) for slot, b in held.items())),
        budget="global",
        num_envs=48,
    )
    script.see(
        member(*(trained(slot, 3, blocks=held[slot]) for slot in (0, 2)), slot_record(1, "lost"))
    ).wait()
    assert _blocks(script) == {"a/0#1": (0, 1, 2), "a/2#1": (3, 4, 5)}


def test_global_a_planned_change_evens_the_blocks_out() -> None:
    members = member(trained(0, 3, blocks=(0, 1, 2, 3, 4, 5)), slot_record(1), slot_record(2))
    script = _elect(_of(3, key(0)), members, budget="global", num_envs=48).wait()
    assert _blocks(script) == {"a/0#1": (0, 1), "a/1#1": (2, 4), "a/2#1": (3, 5)}


def test_a_block_that_two_survivors_claim_goes_to_the_more_senior() -> None:
    keys = (key(0), key(1), key(2))
    script = _elect(
        _of(4, *keys),
        member(
            trained(0, 4, blocks=(0, 1, 2)), trained(1, 3, blocks=(2, 3)), slot_record(2, "lost")
        ),
        formed=3,
        budget="global",
        num_envs=32,
    ).wait()
    assert _blocks(script) == {"a/0#1": (0, 1, 2), "a/1#1": (3,)}


# --- the end of a job ------------------------------------------------------------------------------


def test_rule_06_finish_is_written_once_when_members_finished_by_agreement() -> None:
    script = _elect(_of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3)))
    script.see(member(trained(0, 3, state="draining", left="finished"), trained(1, 3)))
    (order,) = script.all_of(act.SetJobState)
    assert order.state == "finished"
    script.see(member(trained(0, 3, state="stopped", left="finished"), trained(1, 3)))
    assert script.orders == ()
    script.feed(ev.JobChanged(job(formed=3, state="finished")))
    assert script.orders == ()


def test_rule_06_an_agreed_stop_is_no_loss_and_no_end_of_the_job() -> None:
    script = _elect(_of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3)))
    script.see(member(trained(0, 3, state="stopped", left="stopped"), trained(1, 3)))
    assert [type(order) for order in script.orders] == [act.Explain]
    assert script.state.timer_at_s is None


def test_a_newcomer_sent_home_is_a_loss_like_any_other() -> None:
    pending = plan(4, key(0), key(1), kind="planned", cause="join", survivors=(key(0),))
    script = _elect(pending, member(trained(0, 3), slot_record(1)), formed=3)
    script.see(member(trained(0, 3), slot_record(1, "draining", left="drained")))
    assert script.ranks == [key(0)]
