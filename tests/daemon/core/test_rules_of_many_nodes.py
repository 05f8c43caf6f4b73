"""DESIGN §4 with several nodes, rule by rule: leases, silence, spares, restores, joining."""

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import joining, permission
from rallypoint.daemon.executors import status
from tests.fakes.membership import (
    LeaderScript,
    NodeScript,
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

A, B, C = key(0), key(0, 1, "b"), key(0, 1, "c")


# --- rule 1 ----------------------------------------------------------------------------------------


def test_rule_01_a_number_that_only_one_member_remembers_is_not_given_out_again() -> None:
    record = member(slot_record(0), newest_generation=56)
    script = LeaderScript(leader_policy()).elect(record)
    assert script.published.generation == 57


def test_rule_01_a_node_says_the_newest_number_it_has_seen() -> None:
    node = NodeScript().make_train(generation=7)
    assert node.state.record().newest_generation == 7


# --- rule 2: the holder of a lease --------------------------------------------------------------------


def test_rule_02_past_its_lease_a_node_hands_out_no_plan_until_it_has_one_again() -> None:
    node = NodeScript().feed(ev.LeaseKept(105.0)).make_train(generation=1)
    node.now = 105.0
    second = plan(2, node.key(0), node.key(1))
    assert node.feed(ev.PlanSeen(second)).all_of(act.SendPlan) == []
    node.feed(ev.LeaseKept(111.0))
    assert [order.plan for order in node.all_of(act.SendPlan)] == [second, second]


def test_rule_02_past_its_lease_a_node_passes_no_mark_on() -> None:
    node = NodeScript().feed(ev.LeaseKept(105.0)).make_train(generation=1)
    node.feed(ev.PlanSeen(plan(2, node.key(0), node.key(1))))
    node.feed(*(ev.WorkerFormed(node.key(slot), 2, "hash", 0) for slot in (0, 1)))
    node.now = 105.0
    assert node.feed(ev.JobSeen(job(formed=2))).all_of(act.SendFormedMark) == []
    node.feed(ev.LeaseKept(111.0))
    assert [order.generation for order in node.all_of(act.SendFormedMark)] == [2, 2]


def test_rule_02_past_its_lease_a_node_allows_no_checkpoint_and_welcomes_with_nothing() -> None:
    node = NodeScript().feed(ev.LeaseKept(105.0)).make_train(generation=1)
    first = node.key(0)
    assert permission.commit_refusal(node.state, first, 1, 104.9) == ""
    assert "past the deadline" in permission.commit_refusal(node.state, first, 1, 105.0)
    assert permission.welcome(node.state, first, 104.9) == (1, node.state.plan)
    assert permission.welcome(node.state, first, 105.0) == (0, None)


def test_rule_02_only_members_of_the_newest_formed_generation_commit() -> None:
    node = NodeScript().make_train(generation=1)
    node.feed(ev.PlanSeen(plan(2, node.key(1))), ev.WorkerFormed(node.key(1), 2, "hash", 0))
    assert permission.commit_refusal(node.state, node.key(0), 1, 100.0) == ""
    refusal = permission.commit_refusal(node.state, node.key(1), 2, 100.0)
    assert refusal == "generation 2 is not marked formed yet"
    node.feed(ev.JobSeen(job(formed=2)))
    assert "no member of generation 2" in permission.commit_refusal(
        node.state, node.key(0), 1, 100.0
    )


# --- rule 4 -----------------------------------------------------------------------------------------


def test_rule_04_nothing_is_restored_while_the_whole_old_generation_answers() -> None:
    script = training_leader(B, C)
    script.see(member(slot_record(0)))
    for _ in range(60):
        assert script.wait().all_of(act.PublishPlan) == []
    script.gone = {B, C}
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.published.restore
    assert script.now < 263.0


def test_rule_04_who_answers_but_cannot_train_any_more_is_waited_for_only_for_a_time() -> None:
    script = training_leader(B, C)
    script.gone = {C}
    script.see(member(slot_record(0)))
    begun = script.now
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.published.restore
    assert 15.0 <= script.now - begun <= 17.0
    assert [m.key for m in script.published.left_out] == [B, C]


def test_rule_04_a_restore_that_dies_still_asks_those_that_were_left_out_before() -> None:
    left_out = plan(3, B, C).members
    script = LeaderScript(leader_policy(alone=False)).elect(
        member(slot_record(0, incarnation=2)),
        plan=plan(4, A, restore=True, left_out=left_out),
        job_record=job(formed=3),
    )
    assert "b/0#1, c/0#1 of an earlier plan still answer" in script.said


def test_rule_04_a_newcomer_of_a_superseded_plan_may_have_formed_and_is_asked_too() -> None:
    """Its node fell silent before its record said so, and the plan was superseded for that."""
    entering = plan(4, A, B, kind="planned", survivors=(A,))
    script = LeaderScript(leader_policy(alone=False))
    script.elect(member(trained(0, 3)), plan=entering, job_record=job(formed=3))
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.ranks == [A]
    assert [m.key for m in script.published.left_out] == [B]


def test_rule_04_a_restore_takes_the_node_that_holds_the_newest_checkpoint() -> None:
    settings = {"alone": False, "shared_checkpoints": False, "max_workers": 2}
    script = LeaderScript(leader_policy(**settings))
    script.elect(
        member(slot_record(0)),
        member(slot_record(0), node_name="b", checkpoint=(3, 10)),
        member(slot_record(0), node_name="c", checkpoint=(3, 40)),
        job_record=job(formed=3, iteration=40),
    )
    assert script.ranks == [A, C]


def test_rule_04_a_restore_waits_for_the_holder_of_the_newest_checkpoint_but_not_for_ever() -> None:
    settings = {"alone": False, "shared_checkpoints": False}
    script = LeaderScript(leader_policy(**settings))
    older = member(slot_record(0), node_name="b", checkpoint=(3, 10))
    script.elect(older, job_record=job(formed=3, iteration=40, checkpoint=(3, 40)))
    assert "(3, 40) is on no node that is ready" in script.said
    script.wait()
    assert script.published.restore
    assert script.now == 115.0


def test_rule_04_where_a_spare_has_waited_the_holder_gets_its_time_from_the_loss_on() -> None:
    script = training_leader(A, policy={"spares": 1, "shared_checkpoints": False})
    spare = member(slot_record(0), node_name="c", checkpoint=(3, 10))
    newest = job(formed=3, iteration=40, checkpoint=(3, 40))
    script.see(node_record("a"), spare).feed(ev.JobChanged(newest))
    script.now += 100.0
    lost_s = script.now
    script.gone = {A}
    script.see(spare).wait()
    assert script.published.restore
    assert script.now >= lost_s + 15.0


# --- rule 5: hot spares -------------------------------------------------------------------------------


def test_rule_05_a_spare_is_kept_out_and_promoted_at_once_after_a_loss() -> None:
    script = training_leader(A, B, policy={"spares": 1}, wanted_workers=2)
    spare = member(slot_record(0), node_name="c")
    script.see(node_record("a"), node_record("b"), spare)
    assert script.all_of(act.PublishPlan) == []
    assert "1 are kept as spares" in script.said
    script.gone = {B}
    script.see(node_record("a"), spare).wait()
    forced = script.published
    assert [m.key for m in forced.members] == [A]
    assert forced.wanted_workers == 2
    script.feed(ev.PlanChanged(forced)).see(node_record("a", 4), spare)
    script.feed(ev.JobChanged(job(formed=4, checkpoint=(4, 0))))
    while not script.all_of(act.PublishPlan):
        assert script.now < 202.0, "no debounce: at once"
        script.wait()
    assert script.ranks == [A, C]


def test_rule_05_a_start_keeps_spares_out_but_never_below_min_workers() -> None:
    records = [member(slot_record(0), node_name=name) for name in ("a", "b", "c")]
    few = LeaderScript(leader_policy(spares=2)).elect(*records)
    assert few.ranks == [A]
    assert LeaderScript(leader_policy(spares=2, min_workers=2)).elect(*records).ranks == [A, B]


# --- rule 7 -----------------------------------------------------------------------------------------


def test_rule_07_a_new_leader_gives_members_time_to_register_again() -> None:
    script = LeaderScript(leader_policy(alone=False))
    present = plan(4, A, B, survivors=(A, B))
    script.elect(node_record("a", 3), plan=present, job_record=job(formed=3))
    assert script.all_of(act.PublishPlan) == []
    script.see(node_record("a", 4), node_record("b", 4))
    assert script.all_of(act.MarkFormed) == [act.MarkFormed(4)]


def test_rule_07_a_leader_that_lost_its_key_decides_nothing_until_it_is_elected_again() -> None:
    script = training_leader(A, B)
    script.gone = {B}
    script.feed(ev.LeaderLost()).see(node_record("a"))
    assert [type(order) for order in script.orders] == [act.Explain]
    script.elect(node_record("a"), plan=plan(3, A, B, survivors=(A, B)), job_record=job(formed=3))
    script.wait()
    assert script.ranks == [A]


def test_rule_07_the_newest_checkpoint_is_in_the_store_for_the_next_leader() -> None:
    script = LeaderScript(leader_policy())
    known = member(trained(0, 3), checkpoint=(3, 40))
    script.elect(known, plan=plan(3, A, survivors=(A,)), job_record=job(formed=3))
    assert script.state.job is not None
    assert script.state.job.checkpoint == (3, 40), "recorded, as ordered"


# --- rule 8 -----------------------------------------------------------------------------------------


def test_rule_08_a_node_that_flaps_is_kept_out_for_a_while_and_can_be_cleared() -> None:
    node = NodeScript(slots=1).make_train(generation=1)
    generation, other = 1, key(0, 1, "b")
    while not node.state.record().quarantined:
        assert generation < 60
        node.now += 5.0
        node.feed(ev.PlanSeen(plan(generation + 1, node.key(0), other)))
        node.feed(ev.WorkerFormed(node.key(0), generation + 1, "hash", 0))
        node.feed(ev.JobSeen(job(formed=generation + 1)))
        node.feed(ev.PlanSeen(plan(generation + 2, other)))
        generation += 2
    (said,) = (x for x in node.all_of(act.Explain) if x.event == "node_quarantined")
    record = node.state.record()
    assert said.reason.startswith(record.quarantined)
    assert node.state.shown(node.state.slots[0]) == "quarantined"
    (listed,) = status.quarantined(node.state, node.now + 100.0)
    assert (listed["failures"], listed["seconds_left"]) == (12, 200.0)
    assert listed["reason"] == record.quarantined
    assert "12 plans in a row" in record.quarantined
    script = training_leader(B)
    script.see(node_record("b"), record).now += 10.0
    assert script.see(node_record("b"), record).all_of(act.PublishPlan) == []
    node.feed(ev.QuarantineCleared(0))
    assert node.state.record().quarantined == ""
    assert status.quarantined(node.state, node.now) == []


def test_rule_08_a_node_hears_from_the_job_that_an_operator_clears_it_and_each_time_once() -> None:
    node = NodeScript(slots=1).make_train(generation=1)
    quarantined = replace(node.state, quarantined_until_s=node.now + 300.0)
    for times, clears in enumerate(({"b": (1, None)}, {"a": (1, None)}, {"a": (1, None)})):
        node.state = quarantined if times < 2 else replace(node.state, quarantined_until_s=1e9)
        node.feed(ev.JobSeen(job(formed=1, iteration=times, clears=clears)))
        assert bool(node.state.record().quarantined) == (times != 1)
    node.feed(ev.JobSeen(job(formed=1, clears={"a": (2, None)})))
    assert node.state.record().quarantined == ""


def test_rule_08_left_out_newcomers_and_single_workers_are_no_flapping() -> None:
    node = NodeScript(slots=2).make_train(generation=1)
    stays, newcomer = node.key(0), node.key(1)
    for generation in range(2, 60, 2):
        node.now += 5.0
        node.feed(
            ev.PlanSeen(plan(generation, stays, newcomer, kind="planned", formed=generation - 1))
        )
        node.feed(ev.WorkerBroke(newcomer, generation, "a third one died"))
        node.feed(ev.PlanSeen(plan(generation + 1, stays, formed=generation - 1)))
        node.feed(ev.WorkerFormed(stays, generation + 1, "hash", 0))
    assert node.state.record().quarantined == ""


def test_rule_08_a_quarantined_node_comes_back_after_the_cooldown() -> None:
    node = NodeScript(slots=1)
    node.feed(ev.NodeStarted())
    node.state = replace(node.state, quarantined_until_s=node.now + 300.0)
    node.feed(ev.LeaseKept(1e9), ev.TimerFired())
    assert node.state.record().quarantined
    node.wait()
    assert node.state.record().quarantined == ""


# --- rule 11 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"job_uid": "x"}, "job uid x here, uid in the job"),
        ({"config_hash": "x"}, "configuration hash x here, hash in the job"),
        ({"versions": {"torch": "1"}}, "torch 1 here, 2 in the job"),
    ],
    ids=["uid", "config", "torch"],
)
def test_rule_11_who_differs_is_refused_with_the_difference(
    fields: dict[str, Any], words: str
) -> None:
    record = job(formed=3)
    record = type(record)(uid="uid", config_hash="hash", versions={"torch": "2"}, formed=3)
    stranger = member(slot_record(0), node_name="c", **fields)
    assert words in joining.joining_refusal(record, stranger, [node_record("a")])
    script = training_leader(A)
    script.feed(ev.JobChanged(record)).see(node_record("a"), stranger)
    script.now += 10.0
    assert script.see(node_record("a"), stranger).all_of(act.PublishPlan) == []


def test_rule_11_versions_may_change_while_nobody_else_is_there() -> None:
    record = type(job())(uid="uid", config_hash="hash", versions={"torch": "2"})
    upgraded = member(slot_record(0), versions={"torch": "3", "python": "3.12"})
    assert joining.joining_refusal(record, upgraded, [upgraded]) == ""
    assert "torch 3" in joining.joining_refusal(record, upgraded, [node_record("b")])


def test_rule_11_progress_without_a_readable_checkpoint_waits_for_its_holder() -> None:
    settings = {"alone": False, "shared_checkpoints": False}
    script = LeaderScript(leader_policy(**settings))
    script.elect(member(slot_record(0)), job_record=job(iteration=40, checkpoint=(3, 40)))
    script.now += 1000.0
    script.see(member(slot_record(0)))
    assert script.all_of(act.PublishPlan) == []
    assert script.all_of(act.SetJobState) == []
    script.see(member(slot_record(0), checkpoint=(3, 40)))
    assert script.published.resumes


# --- found by the simulation --------------------------------------------------------------------------


def test_rule_09_a_planned_change_does_not_wait_for_a_generation_that_stands_still() -> None:
    node = NodeScript(slots=1).make_train(generation=3)
    mine, leaver = node.key(0), key(0, 1, "b")
    pending = plan(4, mine, kind="planned", survivors=(mine,), formed=3)
    node.feed(ev.PlanSeen(pending), ev.GenerationStuck(3, "the leaver's machine is gone"))
    script = LeaderScript(leader_policy(alone=False))
    script.elect(node.state.record(), plan=pending, job_record=job(formed=3)).wait()
    assert (script.published.kind, script.published.cause) == ("forced", "hang")
    assert script.ranks == [mine]
    assert leaver not in script.ranks


def test_rule_02_who_was_left_out_while_cut_off_is_released_when_the_lease_is_back() -> None:
    node = NodeScript(slots=1).feed(ev.LeaseKept(105.0)).make_train(generation=1)
    node.now = 106.0
    node.feed(ev.PlanSeen(plan(2, key(0, 1, "b"))))
    assert node.all_of(act.SendPlan) == []
    node.feed(ev.LeaseKept(112.0))
    assert [order.plan.generation for order in node.all_of(act.SendPlan)] == [2]


def test_an_adopted_worker_of_a_generation_long_past_hears_the_newest_plan() -> None:
    node = NodeScript(slots=1).feed(ev.PlanSeen(plan(7, B)), ev.JobSeen(job(formed=7)))
    node.feed(ev.NodeStarted((ev.AdoptedWorker(node.key(0), 1),)), ev.WorkerConnected(node.key(0)))
    node.feed(ev.WorkerBecameReady(node.key(0), "host", 5000, "cpu", 0, 3, None))
    assert [order.plan.generation for order in node.all_of(act.SendPlan)] == [7]


def test_a_plan_ends_the_generations_that_its_members_cannot_be_waiting_in() -> None:
    assert plan(9, A, formed=7).ends_below == 9, "forced: all before it"
    assert plan(9, A, kind="planned", formed=8).ends_below == 8, "its members train in 8"
