"""The leader tells an error of the program from the loss of a worker (DESIGN 4.8)."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.records import FaultRecord, MemberRecord
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


def _elect(present: Plan, *members: MemberRecord) -> LeaderScript:
    """A leader of a job that trains by this plan."""
    record = job(formed=present.generation, iteration=20, restore_generation=1)
    return LeaderScript(leader_policy()).elect(*members, plan=present, job_record=record)


def _of(generation: int, *keys: WorkerKey, **fields: object) -> Plan:
    """A plan all of whose members survived."""
    return plan(generation, *keys, survivors=keys, **fields)  # type: ignore[arg-type]


def _fault(incarnation: int = 1, **fields: object) -> FaultRecord:
    values: dict[str, object] = {
        "incarnation": incarnation,
        "generation": 3,
        "iteration": 21,
        "fingerprint": "builtins.ValueError at reward.py:7",
        "times": 1,
        "traceback": "Traceback (most recent call last): …",
        **fields,
    }
    return FaultRecord(**values)  # type: ignore[arg-type]


def _failure(script: LeaderScript) -> act.SetJobState:
    (order,) = script.all_of(act.SetJobState)
    return order


def test_rule_08_ranks_that_raised_it_in_earlier_lives_have_raised_it_in_turn() -> None:
    """Where the job holds without the lost, nobody redoes the iteration alone: somebody is spared each time."""
    present = _of(3, key(0, 2), key(1))
    spared = trained(0, 3, incarnation=2, fault=_fault(incarnation=1, generation=2))
    raised = slot_record(1, "starting", incarnation=2, fault=_fault(incarnation=1))
    order = _failure(_elect(present, member(spared, raised)))
    assert "in every worker that ran it (a/0, a/1)" in order.reason


def test_an_exception_of_earlier_lives_only_is_no_program_error() -> None:
    present = _of(3, key(0, 2), key(1, 2))
    earlier = {"fault": _fault(incarnation=1, generation=2), "incarnation": 2}
    script = _elect(present, member(trained(0, 3, **earlier), trained(1, 3, **earlier)))
    assert script.all_of(act.SetJobState) == []


def test_rule_08_the_same_exception_from_every_rank_together_fails_the_job() -> None:
    script = _elect(_of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3)))
    one = slot_record(0, "starting", incarnation=2, fault=_fault())
    script.see(member(one, trained(1, 3)))
    assert script.all_of(act.SetJobState) == []
    script.see(member(one, slot_record(1, "starting", incarnation=2, fault=_fault())))
    order = _failure(script)
    assert order.state == "failed"
    assert "reward.py:7 at iteration 21" in order.reason
    assert "a/0, a/1" in order.reason
    assert order.reason.count("Traceback") == 1
    assert script.all_of(act.PublishPlan) == []


def test_rule_08_the_same_exception_in_turn_over_the_redo_fails_the_job() -> None:
    first = slot_record(0, "warming", incarnation=2, fault=_fault())
    script = _elect(_of(4, key(1)), member(first, trained(1, 4)))
    assert script.all_of(act.SetJobState) == []
    second = slot_record(1, "starting", incarnation=2, fault=_fault(generation=4))
    script.see(member(first, second))
    assert _failure(script).state == "failed"


def test_rule_08_a_world_of_one_must_raise_it_twice() -> None:
    script = _elect(_of(3, key(0)), member(trained(0, 3)))
    script.see(member(slot_record(0, "starting", incarnation=2, fault=_fault())))
    assert script.all_of(act.SetJobState) == []
    again = _of(4, key(0, 2), restore=True)
    script.feed(ev.PlanChanged(again))
    script.see(member(slot_record(0, "starting", incarnation=3, fault=_fault(2, times=2))))
    assert _failure(script).state == "failed"


@pytest.mark.parametrize(
    "other",
    [_fault(iteration=22), _fault(fingerprint="builtins.KeyError at net.py:1"), None],
    ids=["iteration", "exception", "killed"],
)
def test_rule_08_anything_else_is_a_loss_not_a_program_error(other: FaultRecord | None) -> None:
    script = _elect(_of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3)))
    script.see(
        member(
            slot_record(0, "starting", incarnation=2, fault=_fault()),
            slot_record(1, "starting", incarnation=2, fault=other),
        )
    )
    assert script.all_of(act.SetJobState) == []


def test_rule_08_collateral_connection_closed_is_no_program_error() -> None:
    script = _elect(_of(3, key(0), key(1)), member(trained(0, 3), trained(1, 3)))
    script.see(
        member(
            slot_record(0, "starting", incarnation=2, fault=_fault()),
            trained(1, 3, broken_generation=3),
        )
    ).wait()
    assert script.all_of(act.SetJobState) == []
    assert script.ranks == [key(1)]


def test_rule_08_a_fault_in_every_warm_up_fails_the_job_before_any_plan() -> None:
    script = LeaderScript(leader_policy()).elect(
        member(slot_record(0, "warming"), slot_record(1, "warming"))
    )
    early = _fault(generation=0, iteration=0)
    script.see(member(slot_record(0, "starting", fault=early), slot_record(1, "warming")))
    assert script.all_of(act.SetJobState) == []
    script.see(member(slot_record(0, "starting", fault=early), slot_record(1, "lost", fault=early)))
    assert _failure(script).state == "failed"


def test_rule_08_one_slot_that_cannot_warm_up_does_not_fail_the_others() -> None:
    early = _fault(generation=0, iteration=0, times=9)
    script = _elect(_of(3, key(0)), member(trained(0, 3), slot_record(1, "lost", fault=early)))
    assert script.orders == ()


def test_rule_08_a_fault_of_an_earlier_life_is_not_held_against_one_that_trains() -> None:
    faulted = trained(0, 5, incarnation=3, fault=_fault(2, times=2))
    script = _elect(_of(5, key(0, 3)), member(faulted))
    assert script.orders == ()
