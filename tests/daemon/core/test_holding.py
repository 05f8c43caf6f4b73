"""What a node says of a generation that is broken where nothing new can be agreed."""

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import holding
from tests.fakes.membership import NodeScript, job, key, plan


def test_a_generation_that_all_workers_of_the_node_are_in_is_not_broken() -> None:
    node = NodeScript(1)
    assert holding.broken_here(node.state) == ""
    assert holding.broken_here(node.make_train(3).state) == ""


def test_a_worker_that_is_gone_breaks_it_also_when_its_slot_lives_again() -> None:
    node = NodeScript(2).make_train(3).exit(1)
    assert holding.broken_here(node.state) == "a/1#1 of generation 3 is gone"
    node.make_ready(1)
    assert holding.broken_here(node.state) == "a/1#1 of generation 3 is gone"


def test_a_worker_that_reports_it_broken_says_so_for_a_loss_elsewhere() -> None:
    node = NodeScript(1)
    node.feed(ev.NodeStarted()).make_ready(0)
    far = key(0, node_name="b")
    node.feed(ev.PlanSeen(plan(3, node.key(0), far)), ev.WorkerFormed(node.key(0), 3, "hash", 0))
    node.feed(ev.JobSeen(job(formed=3)))
    node.feed(ev.WorkerBroke(node.key(0), 3, "closed"))
    assert holding.broken_here(node.state) == "a/0#1 reports generation 3 broken"
    node.feed(ev.PlanSeen(plan(4, node.key(0))), ev.WorkerFormed(node.key(0), 4, "hash", 0))
    assert holding.broken_here(node.state), "not before it is marked"
    node.feed(ev.JobSeen(job(formed=4)))
    assert holding.broken_here(node.state) == ""


def test_the_lease_is_trouble_once_it_is_over() -> None:
    node = NodeScript(1)
    assert holding.lease_trouble(node.state, 1e9) == "", "embedded membership has none"
    node.feed(ev.LeaseKept(105.0))
    assert holding.lease_trouble(node.state, 104.9) == ""
    assert "no lease since 7 s" in holding.lease_trouble(node.state, 112.0)
