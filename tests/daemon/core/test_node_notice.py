"""A preemption notice: rank 0 commits first, the node leaves in good order or by force, exit code 75."""

from dataclasses import replace

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from tests.fakes.membership import NodeScript, job, key, plan


def of_several(slots: int = 1) -> NodeScript:
    """A node that is not the only one, and trains."""
    node = NodeScript(slots)
    node.state = replace(node.state, policy=replace(node.state.policy, alone=False))
    return node.make_train().feed(ev.JobSeen(job(formed=1)))


def notice(node: NodeScript, left_s: float) -> NodeScript:
    return node.feed(ev.NoticeReceived(node.now + left_s, "spot: terminate"))


def exits(node: NodeScript) -> list[act.ExitSupervisor]:
    return node.all_of(act.ExitSupervisor)


def test_rank_0_commits_first_and_the_record_says_how_long_it_has() -> None:
    node = notice(of_several(2), 30.0)
    assert node.all_of(act.SendCheckpoint) == [act.SendCheckpoint(key(0), "spot: terminate")]
    (written,) = node.all_of(act.WriteMember)
    record = written.record
    assert (record.draining, record.drain_cause, record.deadline_s) == (True, "notice", 30.0)
    assert node.all_of(act.SendLeave) == [], "it trains on until a plan without it has formed"


def test_a_node_without_rank_0_commits_nothing() -> None:
    node = NodeScript(1)
    node.state = replace(node.state, policy=replace(node.state.policy, alone=False))
    node.feed(ev.NodeStarted()).make_ready(0)
    node.feed(ev.PlanSeen(plan(1, key(0, 1, "b"), key(0))), ev.WorkerFormed(key(0), 1, "hash", 0))
    node.feed(ev.JobSeen(job(formed=1)))
    assert notice(node, 30.0).all_of(act.SendCheckpoint) == []


def test_it_leaves_when_a_plan_without_it_has_formed_and_exits_with_75() -> None:
    node = notice(of_several(), 30.0)
    node.feed(ev.PlanSeen(plan(2, key(0, 1, "b"), kind="planned")), ev.JobSeen(job(formed=2)))
    assert node.all_of(act.SendLeave) == [act.SendLeave(key(0), "drained")]
    node.feed(ev.WorkerLeft(key(0), 9, "drained")).exit(0, signal=None)
    assert exits(node) == [act.ExitSupervisor(75, "spot: terminate")]


@pytest.mark.parametrize(("left_s", "forced_after_s"), [(120.0, 115.0), (30.0, 25.0), (6.0, 5.0)])
def test_without_a_safe_point_it_goes_by_force_before_the_deadline(
    left_s: float, forced_after_s: float
) -> None:
    node = of_several()
    begun = node.now
    notice(node, left_s).wait()
    assert node.now == begun + forced_after_s
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0)]
    assert exits(node) == [act.ExitSupervisor(75, "spot: terminate")]


def test_a_late_notice_goes_by_force_at_once() -> None:
    node = notice(of_several(), -3.0)
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(0)]
    assert [order.code for order in exits(node)] == [75]


def test_a_repeated_notice_can_only_bring_the_deadline_nearer_and_commits_once() -> None:
    node = of_several()
    begun = node.now
    notice(node, 30.0)
    assert node.state.timer_at_s == begun + 25.0
    assert notice(node, 100.0).all_of(act.SendCheckpoint) == []
    assert node.state.timer_at_s == begun + 25.0
    assert notice(node, 6.0).state.timer_at_s == begun + 5.0


def test_a_notice_overrides_a_drain() -> None:
    node = of_several().feed(ev.DrainRequested(None))
    notice(node, 30.0)
    assert [type(order) for order in node.all_of(act.SendCheckpoint)] == [act.SendCheckpoint]
    node.feed(ev.DrainRequested(None))
    node.wait()
    assert exits(node) == [act.ExitSupervisor(75, "spot: terminate")]


def test_a_notice_during_a_stop_only_brings_its_end_nearer() -> None:
    node = of_several().feed(ev.StopRequested("SIGTERM"))
    begun = node.now
    notice(node, 6.0)
    assert node.state.timer_at_s == begun + 5.0
    node.wait()
    assert exits(node) == [act.ExitSupervisor(0, "SIGTERM")]


def test_where_there_is_no_other_node_the_job_stops_by_agreement_with_75() -> None:
    node = NodeScript(2).make_train().feed(ev.JobSeen(job(formed=1)))
    notice(node, 30.0)
    assert [order.key for order in node.all_of(act.SendCheckpoint)] == [key(0)]
    assert [order.key for order in node.all_of(act.SendStop)] == [key(0), key(1)]
    for slot in (0, 1):
        node.feed(ev.WorkerLeft(key(slot), 9, "stopped")).exit(slot, signal=None)
    assert exits(node) == [act.ExitSupervisor(75, "spot: terminate")]


def test_when_all_nodes_drain_the_stop_keeps_deadline_and_exit_code() -> None:
    node = of_several()
    begun = node.now
    notice(node, 12.0).feed(ev.StopRequested("drained: no node is left"))
    assert node.all_of(act.SendStop) == [act.SendStop(key(0), "stopped")]
    assert node.state.timer_at_s == begun + 10.0
    node.feed(ev.WorkerLeft(key(0), 9, "stopped")).exit(0, signal=None)
    node.feed(ev.JobSeen(job(formed=1, state="finished", reason="stopped")))
    assert [order.code for order in exits(node)] == [75]


def test_a_job_that_finishes_first_ends_with_0() -> None:
    node = notice(of_several(), 30.0)
    node.feed(ev.WorkerLeft(key(0), 50, "finished")).exit(0, signal=None)
    node.feed(ev.JobSeen(job(formed=1, state="finished", reason="agreed")))
    assert [order.code for order in exits(node)] == [0]


def test_a_hint_lets_rank_0_commit_and_nobody_leaves() -> None:
    node = of_several().feed(ev.CheckpointAdvised("rebalance"))
    assert node.orders == (act.SendCheckpoint(key(0), "rebalance"),)
    assert node.state.ending is None
