"""What operators ask of the whole job through its record: pause, resume, scale."""

from typing import Any

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


def of(generation: int, *keys: WorkerKey, **fields: Any) -> Plan:
    """A plan all of whose members survived."""
    return plan(generation, *keys, survivors=keys, **fields)


def leading(present: Plan, *members: MemberRecord, wish: Any = None, **policy: Any) -> LeaderScript:
    """The leader of a job with this plan, formed."""
    record = record_of(present.generation, **(wish or {}))
    script = LeaderScript(leader_policy(**policy))
    return script.elect(*members, plan=present, job_record=record)


def record_of(formed: int, **fields: Any) -> Any:
    return job(formed=formed, iteration=20, restore_generation=1, **fields)


TWO = member(trained(0, 3), trained(1, 3))


def test_a_pause_is_a_planned_generation_of_the_same_members_that_holds() -> None:
    script = leading(of(3, key(0), key(1)), TWO)
    script.feed(ev.JobChanged(record_of(3, state="paused", reason="pause")))
    paused = script.published
    assert (paused.kind, paused.cause, paused.hold) == ("planned", "scale", True)
    assert script.ranks == [key(0), key(1)]
    script.feed(ev.PlanChanged(paused)).see(member(trained(0, 4), trained(1, 4)))
    script.feed(ev.JobChanged(record_of(4, state="paused")))
    assert script.all_of(act.PublishPlan) == [], "once"
    script.feed(ev.JobChanged(record_of(4)))
    assert (script.published.hold, script.published.generation) == (False, 5)


def test_whatever_happens_while_it_is_paused_the_job_holds() -> None:
    paused = {"state": "paused"}
    lost = leading(of(3, key(0), key(1), hold=True), TWO, wish=paused)
    lost.see(member(trained(0, 3), slot_record(1, "lost"))).wait()
    assert (lost.published.kind, lost.published.hold) == ("forced", True)
    joins = leading(of(3, key(0), hold=True), member(trained(0, 3), slot_record(1)), wish=paused)
    joins.wait()
    assert (joins.published.cause, joins.published.hold) == ("join", True)
    begins = LeaderScript(leader_policy()).elect(
        member(slot_record(0, checkpoint=(3, 20))), job_record=record_of(3, state="paused")
    )
    assert (begins.published.restore, begins.published.hold) == (True, True)


def test_a_resumed_job_below_min_workers_goes_on_holding() -> None:
    script = leading(
        of(3, key(0), hold=True), member(trained(0, 3)), wish={"state": "paused"}, min_workers=2
    )
    script.feed(ev.JobChanged(record_of(3)))
    assert script.all_of(act.PublishPlan) == []


def test_scaling_down_lets_the_last_ranks_go_and_keeps_them_out() -> None:
    three = member(trained(0, 3), trained(1, 3), trained(2, 3))
    script = leading(of(3, key(2), key(0), key(1)), three)
    script.feed(ev.JobChanged(record_of(3, workers=2)))
    assert (script.published.kind, script.published.cause) == ("planned", "scale")
    assert script.ranks == [key(2), key(0)]
    script.feed(ev.PlanChanged(script.published))
    script.see(member(trained(0, 4), trained(1, 3, state="ready"), trained(2, 4)))
    script.feed(ev.JobChanged(record_of(4, workers=2)))
    assert script.all_of(act.PublishPlan) == []
    assert "the job has its 2 workers" in script.said
    script.feed(ev.JobChanged(record_of(4, workers=3)))
    assert script.wait().ranks == [key(2), key(0), key(1)]
    assert script.published.cause == "join"


def test_a_loss_is_made_up_for_by_who_was_scaled_out() -> None:
    scaled = {"workers": 1}
    members = member(trained(0, 3), trained(1, 2, state="ready"))
    script = leading(of(3, key(0)), members, wish=scaled)
    assert script.all_of(act.PublishPlan) == []
    script.see(member(slot_record(0, "lost"), trained(1, 2, state="ready")))
    assert (script.published.restore, script.ranks) == (True, [key(1)])


def test_a_pause_and_a_new_size_are_one_change() -> None:
    script = leading(of(3, key(0), key(1)), TWO)
    script.feed(ev.JobChanged(record_of(3, state="paused", workers=1)))
    assert (script.published.hold, script.ranks) == (True, [key(0)])


def test_a_size_outside_of_the_bounds_is_the_nearest_inside() -> None:
    few = leading(of(3, key(0), key(1)), TWO, wish={"workers": 1}, min_workers=2)
    assert few.all_of(act.PublishPlan) == []
    many = leading(of(3, key(0)), member(trained(0, 3), slot_record(1)), wish={"workers": 9})
    assert many.wait().published.wanted_workers == 4


def test_spares_enter_when_the_job_is_scaled_up() -> None:
    members = member(trained(0, 3), slot_record(1))
    script = leading(of(3, key(0)), members, spares=1)
    assert "kept as spares" in script.said
    script.feed(ev.JobChanged(record_of(3, workers=2)))
    assert script.ranks == [key(0), key(1)]
