"""The leader before anything has formed: whom it waits for, numbers, ranks, refusal (DESIGN 4)."""

from rallypoint.daemon.core import actions as act
from tests.fakes.membership import (
    LeaderScript,
    job,
    key,
    leader_policy,
    member,
    slot_record,
)


def test_rule_04_the_first_generation_waits_for_all_slots() -> None:
    script = LeaderScript(leader_policy(max_workers=2))
    script.elect(member(slot_record(0), slot_record(1, "warming")))
    assert script.all_of(act.PublishPlan) == []
    assert "1 ready of 2 slots" in script.said
    script.see(member(slot_record(0, ready_order=2), slot_record(1, ready_order=1)))
    first = script.published
    assert (first.generation, first.kind, first.cause) == (1, "forced", "start")
    assert (first.restore, first.commit_first, first.hold) == (True, True, False)
    assert script.ranks == [key(1), key(0)]
    assert first.survivors == ()
    assert script.all_of(act.PublishPlan)[0].replaces == 0


def test_rule_04_the_first_generation_waits_at_most_the_debounce_after_the_first_is_ready() -> None:
    script = LeaderScript(leader_policy())
    script.elect(member(slot_record(0), slot_record(1, "warming"))).wait()
    assert script.now == 101.0
    assert script.ranks == [key(0)]


def test_rule_04_the_start_takes_no_more_than_max_workers_and_waits_for_no_more() -> None:
    script = LeaderScript(leader_policy(max_workers=2))
    script.elect(member(slot_record(0), slot_record(1), slot_record(2, "warming")))
    assert script.ranks == [key(0), key(1)]


def test_rule_04_a_start_waits_for_min_workers() -> None:
    script = LeaderScript(leader_policy(min_workers=2))
    script.elect(member(slot_record(0), slot_record(1, "lost")))
    assert script.all_of(act.PublishPlan) == []
    assert "1 ready of 1 slots, at least 2 needed" in script.said
    assert script.state.timer_at_s is None


def test_rule_01_numbers_go_on_above_everything_known() -> None:
    record = slot_record(0, checkpoint=(12, 400))
    assert LeaderScript(leader_policy()).elect(member(record), newest=9).published.generation == 13
    assert LeaderScript(leader_policy()).elect(member(record), newest=30).published.generation == 31
    marked = job(formed=44, iteration=400)
    script = LeaderScript(leader_policy()).elect(member(record), job_record=marked)
    assert script.published.generation == 45


def test_rule_03_slots_of_a_node_are_adjacent_at_the_start() -> None:
    script = LeaderScript(leader_policy())
    script.elect(
        member(slot_record(0, ready_order=2), slot_record(1, ready_order=1), node_name="b"),
        member(slot_record(0, ready_order=1), slot_record(1, ready_order=2), node_name="a"),
    )
    assert script.ranks == [key(0), key(1), key(1, 1, "b"), key(0, 1, "b")]


def test_rule_11_recorded_progress_without_any_state_fails_the_job() -> None:
    script = LeaderScript(leader_policy())
    script.elect(member(slot_record(0)), job_record=job(formed=7, iteration=40))
    (order,) = script.all_of(act.SetJobState)
    assert order.state == "failed"
    assert "iteration 40" in order.reason
    assert "--fresh" in order.reason
    assert script.all_of(act.PublishPlan) == []
    script.see(member(slot_record(0), slot_record(1)))
    assert script.orders == ()


def test_rule_11_progress_zero_starts_from_scratch() -> None:
    script = LeaderScript(leader_policy()).elect(member(slot_record(0)), job_record=job(formed=7))
    assert script.published.restore
