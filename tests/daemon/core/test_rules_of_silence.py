"""DESIGN §4.2 and what the leader makes of silence: who has no lease, and who is lost."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.records import MemberRecord, WaitRecord
from tests.fakes.membership import (
    key,
    member,
    node_record,
    slot_record,
    trained,
    training_leader,
)

A, B, C = key(0), key(0, 1, "b"), key(0, 1, "c")


def test_rule_02_a_silent_supervisor_whose_workers_answer_changes_nothing() -> None:
    script = training_leader(A, B)
    script.see(node_record("a"))
    assert script.all_of(act.PublishPlan) == []
    assert "b/0#1 have no lease, but take part" in script.said
    for _ in range(5):
        assert script.wait().all_of(act.PublishPlan) == []
    assert script.see(node_record("a"), node_record("b")).orders == ()


def test_rule_02_collectives_that_end_are_a_witness_even_where_no_probe_gets_through() -> None:
    script = training_leader(A, B)
    script.silent = {B}
    script.feed(ev.CollectivesEnded(3)).see(node_record("a"))
    assert script.all_of(act.PublishPlan) == []
    script.feed(ev.CollectivesEnded(3)).wait()
    assert script.all_of(act.PublishPlan) == []
    script.wait()
    assert script.wait().published.cause == "node_lost", "the witness is too old"


def _waits(name: str, collective: int = 40) -> MemberRecord:
    wait = WaitRecord(0, 1, generation=3, collective=collective, waited_s=2.5)
    return member(trained(0, 3), node_name=name, waits=(wait,))


def test_rule_02_who_is_silent_in_both_planes_is_lost_though_its_port_answers() -> None:
    script = training_leader(A, B, C)
    script.see(_waits("a"), node_record("b"))  # the kernel of a frozen node still answers
    began_s = script.now
    while not script.all_of(act.PublishPlan):
        assert script.now < began_s + 10.0
        script.wait()
    assert (script.ranks, script.published.cause) == ([A, B], "node_lost")
    # It had waited for 2.5 s when it said so; detect_s is 5 s, and losses are gathered for 0.05 s.
    assert script.now - began_s == pytest.approx(2.55)


def test_rule_02_waits_that_end_or_are_of_another_generation_are_no_silence() -> None:
    script = training_leader(A, B)
    for collective in range(40, 60):
        script.see(_waits("a", collective)).now += 2.0
        assert script.all_of(act.PublishPlan) == []
    old = WaitRecord(0, 1, generation=2, collective=9, waited_s=2.5)
    script.see(member(trained(0, 3), node_name="a", waits=(old,)))
    for _ in range(9):
        assert script.wait().all_of(act.PublishPlan) == []


def test_rule_02_a_witness_does_not_bring_back_who_is_known_to_be_gone() -> None:
    script = training_leader(A, B)
    script.gone = {B}
    script.feed(ev.CollectivesEnded(3)).see(node_record("a")).wait()
    assert script.ranks == [A]


def test_rule_02_every_forced_plan_leaves_out_all_members_without_a_lease() -> None:
    script = training_leader(A, B, C)
    script.see(node_record("a"))  # b and c answer
    assert script.all_of(act.PublishPlan) == []
    script.see(node_record("a", broken_generation=3)).wait()
    assert script.ranks == [A]
    assert [m.key for m in script.published.left_out] == [B, C]


def test_rule_02_a_planned_change_waits_for_a_member_without_a_lease() -> None:
    script = training_leader(A, B)
    newcomer = member(slot_record(0), node_name="c")
    script.see(node_record("a"), newcomer)
    for _ in range(3):
        assert script.wait().all_of(act.PublishPlan) == []
    script.see(node_record("a"), node_record("b"), newcomer)
    assert script.ranks == [A, B, C]
