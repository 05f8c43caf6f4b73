"""Hangs and crash loops as the node and the leader take them (DESIGN 4.8, 4.9)."""

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from tests.fakes.membership import (
    LeaderScript,
    NodeScript,
    job,
    key,
    leader_policy,
    member,
    plan,
    slot_record,
    trained,
)

AFTER = 12
"""``quarantine_after`` of the node that tests use."""
COOLDOWN_S = 300.0


def fail_until_quarantined(node: NodeScript, *slots: int) -> NodeScript:
    """Lives of these slots (0 when none is given) end before they form, one after the other."""
    slots = slots or (0,)
    for _ in range(AFTER - 1):
        for slot in slots:
            node.exit(slot)
        while any(node.states[slot] == "lost" for slot in slots):
            node.wait()
    for slot in slots:
        node.exit(slot)
    return node


# --- quarantine -----------------------------------------------------------------------------------


def test_rule_08_a_slot_that_fails_again_and_again_is_quarantined_for_a_while() -> None:
    node = fail_until_quarantined(NodeScript(1).feed(ev.NodeStarted()))
    assert node.states == ["quarantined"]
    assert node.all_of(act.StartWorker) == []
    assert "quarantined; restart in 300 s" in node.all_of(act.Explain)[0].reason
    (written,) = node.all_of(act.WriteMember)
    assert written.record.slots[0].state == "quarantined"
    began_s = node.now
    node.wait()
    assert node.now == began_s + COOLDOWN_S
    assert node.states == ["starting"]


def test_rule_08_after_the_cooldown_one_more_failure_is_enough() -> None:
    node = fail_until_quarantined(NodeScript(1).feed(ev.NodeStarted())).wait()
    assert node.exit(0).states == ["quarantined"]


def test_rule_08_the_operator_clears_one_slot_or_all() -> None:
    node = NodeScript(3).feed(ev.NodeStarted())
    fail_until_quarantined(node, 0, 1, 2)
    assert node.feed(ev.QuarantineCleared(1)).states == ["quarantined", "starting", "quarantined"]
    assert node.state.slots[1].failures == 0
    assert node.feed(ev.QuarantineCleared(None)).states == ["starting"] * 3
    assert node.feed(ev.QuarantineCleared(None)).orders == ()


def test_rule_08_a_crash_in_training_before_anything_is_committed_counts() -> None:
    node = NodeScript(1).make_train()
    node.feed(ev.WorkerExited(key(0), 70, None, "raised"))
    assert node.state.slots[0].failures == 1
    for _ in range(AFTER - 1):
        node.feed(ev.WorkerExited(node.key(0), 70, None, "raised"))
        if node.states == ["lost"]:
            node.wait()
    assert node.states == ["quarantined"]


def test_rule_08_workers_that_train_and_are_killed_are_never_quarantined() -> None:
    node = NodeScript(1).make_train()
    for generation in range(2, 4 * AFTER):
        node.exit(0).make_ready(0).feed(ev.PlanSeen(plan(generation, node.key(0))))
        node.feed(ev.WorkerFormed(node.key(0), generation, "hash", 0))
    assert node.states == ["training"]
    assert node.state.slots[0].failures == 0


def test_rule_08_the_first_generation_does_not_wait_for_a_quarantined_slot() -> None:
    script = LeaderScript(leader_policy()).elect(
        member(slot_record(0), slot_record(1), slot_record(2, "quarantined"))
    )
    assert script.ranks == [key(0), key(1)]


def test_rule_08_a_slot_that_never_becomes_ready_disturbs_nobody_who_trains() -> None:
    present = plan(3, key(0), key(1), survivors=(key(0), key(1)))
    record = job(formed=3, iteration=20, restore_generation=1)
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 3), trained(1, 3), slot_record(2, "starting")),
        plan=present,
        job_record=record,
    )
    for incarnation, state in ((2, "warming"), (2, "lost"), (3, "starting"), (3, "quarantined")):
        bad = slot_record(2, state, incarnation=incarnation)
        script.see(member(trained(0, 3), trained(1, 3), bad))
        assert script.orders == ()


def test_a_node_that_ends_does_not_start_what_is_cleared() -> None:
    node = NodeScript(2).make_train()
    fail_until_quarantined(node, 1)
    node.feed(ev.StopRequested("stop"), ev.QuarantineCleared(None))
    assert node.all_of(act.StartWorker) == []


# --- hangs ----------------------------------------------------------------------------------------


def test_rule_09_a_hung_worker_is_ended_once_with_evidence() -> None:
    node = NodeScript(2).make_train()
    node.feed(ev.WorkerHung(key(1), "hang: silent"))
    assert node.all_of(act.KillWorker) == [act.KillWorker(key(1), "hang: silent", why="hang")]
    node.feed(ev.WorkerHung(key(1), "hang: silent"))
    assert node.orders == ()
    node.exit(1)
    assert node.all_of(act.StartWorker) == [act.StartWorker(key(1, 2))]
    assert node.state.slots[1].record().hung_incarnation == 1


def test_rule_09_word_of_a_hang_that_comes_after_the_end_is_stale() -> None:
    node = NodeScript(1).make_train().exit(0)
    node.feed(ev.WorkerHung(key(0), "hang"))
    assert node.all_of(act.KillWorker) == []


def test_rule_09_a_stuck_generation_is_reported_broken_and_nobody_is_ended() -> None:
    node = NodeScript(2).make_train()
    node.feed(ev.GenerationStuck(1, "all wait"))
    assert node.all_of(act.KillWorker) == []
    (written,) = node.all_of(act.WriteMember)
    assert [s.broken_generation for s in written.record.slots] == [1, 1]
    assert [s.stuck_generation for s in written.record.slots] == [1, 1]


def test_rule_09_a_stuck_generation_that_is_not_the_newest_is_stale() -> None:
    node = NodeScript(2).make_train()
    node.feed(ev.PlanSeen(plan(2, key(0), key(1))), ev.GenerationStuck(1, "all wait"))
    assert [slot.stuck_generation for slot in node.state.slots] == [0, 0]


def test_rule_09_the_change_without_a_hung_worker_has_that_cause() -> None:
    record = job(formed=3, iteration=20, restore_generation=1)
    present = plan(3, key(0), key(1), survivors=(key(0), key(1)))
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 3), trained(1, 3)), plan=present, job_record=record
    )
    again = slot_record(1, "starting", incarnation=2, hung_incarnation=1)
    script.see(member(trained(0, 3), again)).wait()
    assert (script.published.cause, script.ranks) == ("hang", [key(0)])


def test_rule_09_a_stuck_generation_is_formed_anew_by_all() -> None:
    record = job(formed=3, iteration=20, restore_generation=1)
    present = plan(3, key(0), key(1), survivors=(key(0), key(1)))
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 3), trained(1, 3)), plan=present, job_record=record
    )
    stuck = {"broken_generation": 3, "stuck_generation": 3}
    script.see(member(trained(0, 3, **stuck), trained(1, 3, **stuck))).wait()
    assert (script.published.kind, script.published.cause) == ("forced", "hang")
    assert script.ranks == [key(0), key(1)]
