"""DESIGN §4.2: who was given up while nobody could go on without them may have been there all the time."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from tests.fakes.membership import (
    LeaderScript,
    job,
    key,
    leader_policy,
    member,
    node_record,
    plan,
    slot_record,
    trained,
    training_leader,
)

A, B = key(0), key(0, 1, "b")
WARMING = member(slot_record(0, "warming"), node_name="c")
READY = member(slot_record(0), node_name="c")


def _cut_off(*, keys: set[object]) -> LeaderScript:
    """A leader without workers that lost sight of a and b, which train in generation 3."""
    script = training_leader(A, B)
    script.silent = {A, B}
    script.see(WARMING)
    assert script.all_of(act.PublishPlan) == []
    assert script.state.given_up == keys
    return script


def test_rule_02_members_that_were_given_up_are_asked_again_when_a_survivor_is_back() -> None:
    script = _cut_off(keys={A, B})
    script.now += 10.0
    script.silent = set()
    script.see(node_record("a"), WARMING)
    assert "b/0#1 have no lease, but take part" in script.said
    for _ in range(5):
        assert script.all_of(act.PublishPlan) == []
        script.wait()


def test_rule_02_members_that_were_given_up_and_still_keep_silent_are_lost() -> None:
    script = _cut_off(keys={A, B})
    script.now += 10.0
    script.silent = {B}
    script.see(node_record("a"), WARMING)
    assert (script.ranks, script.published.cause) == ([A], "node_lost")


def test_rule_02_who_answers_and_cannot_train_is_awaited_from_when_it_could_train_last() -> None:
    script = _cut_off(keys={A, B})
    script.now += 10.0
    script.silent = set()
    said = script.see(READY).said
    for _ in range(20):
        said += script.wait().said
        assert script.all_of(act.PublishPlan) == []
    assert "a/0#1, b/0#1 of an earlier plan still answer" in said
    whole_s, script.gone = script.now, {B}
    while not script.wait().all_of(act.PublishPlan):
        assert script.now - whole_s < script.policy.holder_wait_s
    assert script.published.restore
    assert script.now - whole_s == pytest.approx(script.policy.holder_wait_s)


def test_rule_02_survivors_of_a_planned_change_train_on_though_its_newcomer_is_gone() -> None:
    script = LeaderScript(leader_policy(alone=False))
    entering = plan(4, A, B, kind="planned", survivors=(A,), resumes=True)
    gone = member(slot_record(0, "starting", incarnation=2), node_name="b")
    script.silent = {A}
    script.elect(gone, READY, plan=entering, job_record=job(formed=3, checkpoint=(3, 0)))
    script.now += 10.0
    script.silent, script.gone = set(), {B}
    said = ""
    for _ in range(30):
        said += script.feed(ev.TimerFired()).said
        assert script.all_of(act.PublishPlan) == []
        script.now += 1.0
    assert "a/0#1 of an earlier plan still answer" in said


def test_rule_01_who_is_in_a_marked_plan_has_formed_it_whatever_its_new_supervisor_has_read() -> (
    None
):
    script = training_leader(A, B)
    behind = [
        member(trained(0, 2, state="rebuilding"), node_name=name, newest_generation=3)
        for name in ("a", "b")
    ]
    script.see(*behind, READY).wait()
    assert script.ranks == [A, B, key(0, 1, "c")]
    assert script.published.survivors == (A, B)
