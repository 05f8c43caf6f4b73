"""How a node ends: stop, finish, drain, failed job; always bounded, always with the promised code."""

from dataclasses import replace

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from tests.fakes.membership import NodeScript, job, key, plan


def _exit_of(node: NodeScript) -> act.ExitSupervisor:
    (order,) = node.all_of(act.ExitSupervisor)
    return order


def test_rule_06_stop_asks_who_trains_to_agree_and_sends_the_others_home() -> None:
    node = NodeScript(3).feed(ev.NodeStarted()).make_ready(0, 1)
    node.feed(ev.PlanSeen(plan(1, key(0))), ev.WorkerFormed(key(0), 1, "hash", 0))
    node.feed(ev.StopRequested("SIGTERM"))
    assert node.all_of(act.SendStop) == [act.SendStop(key(0), "stopped")]
    assert node.all_of(act.SendLeave) == [act.SendLeave(key(1), "drained")]
    (kill,) = node.all_of(act.KillWorker)
    assert kill.key == key(2)
    assert node.states == ["draining", "draining", "starting"]


def test_rule_06_stop_sends_home_at_once_who_never_formed_a_generation() -> None:
    node = NodeScript(2).feed(ev.NodeStarted()).make_ready(0, 1)
    node.feed(ev.PlanSeen(plan(1, key(0), key(1)))).feed(ev.StopRequested("SIGTERM"))
    assert [order.key for order in node.all_of(act.SendLeave)] == [key(0), key(1)]
    assert node.all_of(act.SendStop) == []


def test_rule_06_stop_exits_with_0_once_every_worker_has_left() -> None:
    node = NodeScript(2).make_train().feed(ev.StopRequested("SIGTERM"))
    node.feed(ev.WorkerLeft(key(0), 9, "stopped"), ev.WorkerLeft(key(1), 9, "stopped"))
    node.exit(0, signal=None)
    assert node.all_of(act.ExitSupervisor) == []
    node.exit(1, signal=None)
    assert _exit_of(node) == act.ExitSupervisor(0, "SIGTERM")
    assert isinstance(node.orders[-1], act.ExitSupervisor)
    assert [slot.left for slot in node.all_of(act.WriteMember)[0].record.slots] == ["stopped"] * 2


def test_rule_06_a_worker_that_dies_during_a_stop_is_not_restarted() -> None:
    node = NodeScript(2).make_train().feed(ev.StopRequested("SIGTERM")).exit(0)
    assert node.all_of(act.StartWorker) == []
    assert node.states == ["lost", "draining"]
    rebuilt = plan(2, key(1))
    node.feed(ev.PlanSeen(rebuilt))
    assert node.all_of(act.SendPlan) == [act.SendPlan(key(1), rebuilt)]
    node.feed(ev.WorkerLeft(key(1), 9, "stopped")).exit(1, signal=None)
    assert _exit_of(node).code == 0


def test_rule_06_stop_kills_what_is_left_after_the_grace() -> None:
    node = NodeScript(2).make_train().feed(ev.StopRequested("SIGTERM"))
    assert node.all_of(act.SetTimer) == [act.SetTimer(node.now + 30.0)]
    node.wait()
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0), key(1)]
    assert _exit_of(node).code == 0


def test_a_stop_before_anything_started_exits_at_once() -> None:
    node = NodeScript(2).feed(ev.StopRequested("SIGINT"))
    assert _exit_of(node) == act.ExitSupervisor(0, "SIGINT")
    node.feed(ev.NodeStarted())
    assert node.orders == ()


def test_a_second_stop_changes_nothing() -> None:
    node = NodeScript(1).make_train().feed(ev.StopRequested("SIGTERM"))
    node.now += 5
    node.feed(ev.StopRequested("SIGTERM"))
    assert [type(order) for order in node.orders] == [act.Explain]
    assert node.state.timer_at_s == 130.0


def test_a_stop_is_said_again_to_a_worker_that_reconnects() -> None:
    node = NodeScript(1).make_train().feed(ev.StopRequested("SIGTERM"))
    node.feed(ev.WorkerConnected(key(0)))
    assert node.all_of(act.SendStop) == [act.SendStop(key(0), "stopped")]


def test_a_process_that_appears_after_its_kill_was_ordered_is_killed() -> None:
    node = NodeScript(1).feed(ev.NodeStarted(), ev.StopRequested("SIGTERM"))
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0)]
    node.feed(ev.WorkerSpawned(key(0), 1000))
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0)]
    node.exit(0)
    assert _exit_of(node).code == 0


@pytest.mark.parametrize("reason", ["finished", "stopped"])
def test_rule_06_leaving_by_agreement_is_no_loss_and_ends_the_node(reason: str) -> None:
    node = NodeScript(3).feed(ev.NodeStarted()).make_ready(0, 1, 2)
    node.feed(ev.PlanSeen(plan(1, key(0), key(1))))
    node.feed(*(ev.WorkerFormed(key(slot), 1, "hash", 0) for slot in (0, 1)))
    node.feed(ev.WorkerLeft(key(0), 50, reason))
    assert node.all_of(act.SendLeave) == [act.SendLeave(key(2), "drained")]
    assert node.all_of(act.SendStop) == []
    node.feed(ev.WorkerLeft(key(1), 50, reason))
    node.exit(0, signal=None).exit(1, signal=None)
    assert node.all_of(act.StartWorker) == []
    node.feed(ev.WorkerLeft(key(2), 0, "drained")).exit(2, signal=None)
    assert _exit_of(node).code == 0
    assert "iteration 50" in _exit_of(node).reason


@pytest.mark.parametrize("written", [True, False], ids=["written", "store away"])
def test_rule_06_with_other_nodes_the_record_stays_until_the_end_is_written(written: bool) -> None:
    node = NodeScript(1)
    policy = replace(node.state.policy, alone=False, stop_grace_s=30.0)
    node.state = replace(node.state, policy=policy)
    node.make_train(generation=1)
    node.feed(ev.WorkerLeft(key(0), 50, "finished")).exit(0, signal=None)
    assert node.all_of(act.ExitSupervisor) == []
    assert [order.record.slots[0].left for order in node.all_of(act.WriteMember)] == ["finished"]
    if written:
        node.feed(ev.JobSeen(job(formed=1, state="finished", reason="agreed")))
    else:
        begun = node.now
        node.wait()
        assert node.now == begun + 30.0, "who waits to enter hears of it as late as then"
    assert _exit_of(node).code == 0


_DRAIN = ev.DrainRequested(None)
_NOTICE = ev.NoticeReceived(136.0, "spot")
"""The machine goes in 36 s; by force 5 s before that."""


@pytest.mark.parametrize(
    ("back_s", "before", "during", "ends_s"),
    [
        pytest.param(125.0, None, None, 155.0, id="back in time"),
        pytest.param(125.0, _DRAIN, None, 130.0, id="back in time, but the node drains"),
        pytest.param(125.0, None, _NOTICE, 130.0, id="back in time, but the machine goes"),
        pytest.param(None, None, None, 130.0, id="away"),
    ],
)
def test_rule_06_a_store_that_comes_back_gets_its_time_to_write_the_agreed_end(
    back_s: float | None, before: ev.NodeEvent | None, during: ev.NodeEvent | None, ends_s: float
) -> None:
    """Whoever led may be gone, and its lease holds the leader's key yet."""
    node = NodeScript(1, now=100.0)
    node.state = replace(node.state, policy=replace(node.state.policy, alone=False))
    node.make_train(generation=1).feed(ev.LeaseKept(105.0))
    node.feed(*(() if before is None else (before,)))
    node.feed(ev.WorkerLeft(key(0), 50, "finished")).exit(0, signal=None)
    node.feed(*(() if during is None else (during,)))
    if back_s is not None:
        node.now = back_s
        node.feed(ev.LeaseKept(back_s + 60.0))
    node.wait()
    assert (node.now, _exit_of(node).code) == (ends_s, 0)


def test_a_failed_job_ends_the_node_with_1_and_the_reason() -> None:
    node = NodeScript(2).make_train().exit(1)
    node.feed(ev.JobSeen(job(formed=1, state="failed", reason="program error: …")))
    assert node.all_of(act.SendLeave) == [act.SendLeave(key(0), "drained")]
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(1, 2)]
    node.exit(0).exit(1)
    assert _exit_of(node) == act.ExitSupervisor(1, "program error: …")


def test_a_job_that_fails_during_a_stop_still_ends_with_1() -> None:
    node = NodeScript(1).make_train().feed(ev.StopRequested("SIGTERM"))
    node.feed(ev.JobSeen(job(formed=1, state="failed", reason="broken")))
    node.wait()
    assert _exit_of(node) == act.ExitSupervisor(1, "broken")


def test_a_finished_job_ends_a_node_that_had_no_part_in_it() -> None:
    node = NodeScript(1).feed(ev.NodeStarted()).make_ready(0)
    node.feed(ev.JobSeen(job(formed=1, state="finished", reason="agreed")))
    node.feed(ev.WorkerLeft(key(0), 0, "drained")).exit(0, signal=None)
    assert _exit_of(node).code == 0


# --- drain ---------------------------------------------------------------------------------------


def test_rule_06_drain_says_so_and_leaves_when_a_plan_without_it_has_formed() -> None:
    node = NodeScript(2).make_train().feed(ev.DrainRequested(None))
    (written,) = node.all_of(act.WriteMember)
    assert (written.record.draining, written.record.drain_cause) == (True, "drain")
    assert node.all_of(act.SendLeave) == []
    node.feed(ev.PlanSeen(plan(2, key(0, 1, "b"), kind="planned")))
    assert len(node.all_of(act.SendPlan)) == 2  # all of the old generation agree on the safe point
    assert node.all_of(act.SendLeave) == []
    node.feed(ev.JobSeen(job(formed=2)))
    assert [order.key for order in node.all_of(act.SendLeave)] == [key(0), key(1)]
    for slot in (0, 1):
        node.feed(ev.WorkerLeft(key(slot), 9, "drained")).exit(slot, signal=None)
    assert _exit_of(node).code == 0


def test_a_drain_leaves_at_once_after_a_forced_plan_without_it() -> None:
    node = NodeScript(1).make_train().feed(ev.DrainRequested(None))
    node.feed(ev.PlanSeen(plan(2, key(0, 1, "b"))))
    assert node.all_of(act.SendLeave) == [act.SendLeave(key(0), "drained")]
    assert node.all_of(act.SetTimer) == [act.SetTimer(node.now + 30.0)]


def test_a_stop_overrides_a_drain() -> None:
    node = NodeScript(1).make_train().feed(ev.DrainRequested(None))
    node.feed(ev.StopRequested("SIGTERM"))
    assert node.all_of(act.SendStop) == [act.SendStop(key(0), "stopped")]


@pytest.mark.parametrize("deadline_s", [None, 6.0])
def test_a_drain_during_a_stop_only_brings_its_end_nearer(deadline_s: float | None) -> None:
    node = NodeScript(1).make_train().feed(ev.StopRequested("SIGTERM"))
    bound_s, begun = node.state.timer_at_s, node.now
    node.feed(ev.DrainRequested(deadline_s))
    assert "SIGTERM" in node.all_of(act.Explain)[0].reason
    assert node.state.timer_at_s == (bound_s if deadline_s is None else begun + 5.0)


def test_a_drain_that_waits_for_a_plan_ends_with_the_job() -> None:
    """The job finishes before the generation without this node has formed: no plan lets it go any more."""
    node = NodeScript(2).make_train().feed(ev.DrainRequested(None))
    node.feed(
        ev.PlanSeen(plan(2, key(0, 1, "b"), kind="planned")), ev.WorkerBroke(key(0), 1, "closed")
    )
    assert node.state.timer_at_s is None, "a drain takes as long as it takes"
    begun = node.now
    node.feed(ev.JobSeen(job(formed=1, state="finished", reason="agreed"))).wait()
    assert node.now == begun + 30.0
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0), key(1)]
    assert _exit_of(node) == act.ExitSupervisor(0, "the job is finished: agreed")


def test_a_notice_ends_with_the_job_and_keeps_its_code_and_deadline() -> None:
    node = NodeScript(1).make_train()
    node.state = replace(node.state, policy=replace(node.state.policy, alone=False))
    node.feed(ev.NoticeReceived(node.now + 6.0, "spot"))
    begun = node.now
    node.feed(ev.JobSeen(job(formed=1, state="finished", reason="agreed"))).wait()
    assert (node.now, _exit_of(node).code) == (begun + 5.0, 75)
