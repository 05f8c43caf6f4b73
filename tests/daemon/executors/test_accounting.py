"""Env steps used or lost, and the time of a membership change."""

import math

import pytest

from rallypoint.daemon.executors.accounting import NewestChanges, RecoveryClock, StepLedger
from rallypoint.daemon.shared.messages import RankRecord, Stepped
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes.facts import A, B, formed, plan


def used(**steps: int) -> list[RankRecord]:
    keys = {"a": A, "b": B}
    return [RankRecord(keys[name], (), (), amount) for name, amount in steps.items()]


def step(key: WorkerKey, generation: int, at_s: float, envs_s: float = 0.0) -> Stepped:
    return Stepped(key=key, generation=generation, at_s=at_s, envs_s=envs_s)


def test_a_dead_workers_steps_are_lost_unless_they_were_used() -> None:
    ledger = StepLedger()
    assert ledger.used(used(a=60, b=40)) == 100
    ledger.died(B, 70, by_agreement=False)
    assert ledger.settle([A, B]) == {}, "the survivors may still commit its rollout"
    assert ledger.used(used(a=60, b=20)) == 80
    assert ledger.settle([A]) == {"died": 10}
    assert ledger.settle([A]) == {}


def test_what_a_worker_itself_reported_is_not_counted_again() -> None:
    ledger = StepLedger()
    ledger.used(used(a=60))
    ledger.reported_lost(A, 25)
    ledger.died(A, 90, by_agreement=True)
    assert ledger.settle() == {"dropped": 5}


def test_the_phases_of_a_forced_change() -> None:
    clock = RecoveryClock("local")
    clock.published(plan(1, A, B), 0.0)
    clock.marked(1)
    clock.noticed(10.0, 10.5)
    clock.noticed(10.2, 10.6)
    clock.published(plan(2, A, B), 12.0)
    clock.formed(formed(A, 2, seconds={"release": 0.1, "group": 0.5}, at_s=14.0))
    clock.formed(formed(B, 2, seconds={"release": 0.3, "sync": 0.2}, at_s=14.5))
    assert clock.stepped(step(A, 2, 15.0)) is None
    change = clock.marked(2)
    assert change is not None
    assert clock.marked(2) is None
    seconds = change.seconds()
    assert (seconds["detect"], seconds["plan"]) == (0.5, 2.0)
    assert (seconds["release"], seconds["group"], seconds["sync"]) == (0.3, 0.5, 0.2)
    assert (seconds["envs"], seconds["first_step"], seconds["total"]) == (None, None, None)
    assert clock.stepped(step(B, 2, 16.0, envs_s=0.25)) is change
    assert clock.stepped(step(B, 2, 17.0)) is None
    assert (change.seconds()["envs"], change.seconds()["first_step"]) == (0.25, 0.5)
    assert change.seconds()["total"] == 6.0


def test_an_outage_over_several_plans_is_counted_from_its_beginning() -> None:
    clock = RecoveryClock("local")
    clock.noticed(1.0, 1.0)
    clock.published(plan(2, A, B), 2.0)
    clock.noticed(5.0, 5.0)
    clock.published(plan(3, A), 6.0)
    clock.formed(formed(A, 3, at_s=7.0))
    change = clock.marked(3)
    assert change is not None
    assert clock.stepped(step(A, 3, 8.0)) is change
    assert change.seconds()["total"] == 7.0


def test_a_planned_change_counts_from_its_plan() -> None:
    clock = RecoveryClock("local")
    clock.published(plan(1, A), 0.0)
    clock.marked(1)
    clock.published(plan(2, A, B, kind="planned", cause="join"), 50.0)
    clock.formed(formed(A, 2, at_s=51.0))
    change = clock.marked(2)
    assert change is not None
    assert change.seconds()["plan"] == 0.0


def test_a_loss_while_a_join_is_awaited_counts_from_the_loss() -> None:
    clock = RecoveryClock("local")
    clock.published(plan(2, A, B, kind="planned", cause="join"), 1.0)
    clock.noticed(5.0, 5.0)
    clock.published(plan(3, A), 6.0)
    clock.formed(formed(A, 3, at_s=7.0))
    clock.stepped(step(A, 3, 8.0))
    change = clock.marked(3)
    assert change is not None
    assert change.complete
    assert change.seconds()["total"] == 3.0


def test_a_loss_is_open_until_all_have_stepped_and_then_it_is_the_newest_change() -> None:
    clock, newest = RecoveryClock("local"), NewestChanges()
    assert clock.open_for_s(5.0) == 0.0
    assert math.isnan(newest.total_s("forced"))
    assert math.isnan(newest.age_s("forced", 5.0))
    clock.published(plan(1, A, B), 5.0)
    clock.marked(1)
    clock.noticed(10.0, 10.5)
    assert clock.open_for_s(12.0) == 2.0, "before there is a plan"
    clock.published(plan(2, A), 12.0)
    clock.marked(2)
    assert clock.open_for_s(14.0) == 4.0, "formed, but nobody has stepped"
    change = clock.stepped(Stepped(key=A, generation=2, at_s=15.0))
    assert change is not None
    newest.take(change)
    assert clock.open_for_s(16.0) == 0.0
    assert newest.total_s("forced") == 5.0
    assert newest.age_s("forced", 17.0) == 7.0
    assert math.isnan(newest.total_s("planned"))


@pytest.mark.parametrize(("node", "hold"), [("elsewhere", False), ("local", True)])
def test_a_node_that_is_left_out_or_holds_has_nothing_to_recover_from(
    node: str, hold: bool
) -> None:
    clock = RecoveryClock(node)
    clock.published(plan(2, A, hold=hold), 12.0)
    assert clock.open_for_s(13.0) == 1.0
    clock.marked(2)
    assert clock.open_for_s(14.0) == 0.0
