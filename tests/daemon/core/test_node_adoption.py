"""A node whose workers an earlier supervisor has started."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import node, permission
from rallypoint.daemon.core.planning import survey
from rallypoint.daemon.shared.plan import Plan
from tests.fakes.membership import NodeScript, job, key, plan

TRAINED = plan(3, key(0, 4), key(1, 2))


def adopting(*slots: int, newer: Plan | None = None) -> NodeScript:
    """Generation 3 was marked formed; workers of these slots (incarnations 4 and 2) are adopted."""
    lives = {0: key(0, 4), 1: key(1, 2), 2: key(2, 9)}
    plans = [ev.PlanSeen(p) for p in (TRAINED, newer) if p is not None]
    adopted = tuple(ev.AdoptedWorker(lives[slot], 1000 + slot) for slot in slots)
    return NodeScript(3).feed(*plans, ev.JobSeen(job(formed=3)), ev.NodeStarted(adopted))


def test_adopted_workers_are_where_the_plan_says_and_the_others_are_started() -> None:
    node = adopting(0, 1)
    assert node.states == ["training", "training", "starting"]
    assert node.all_of(act.StartWorker) == [act.StartWorker(key(2, 1))]
    (written,) = node.all_of(act.WriteMember)
    view = survey([written.record], TRAINED, job(formed=3))
    assert [w.key for w in view.heirs] == [key(0, 4), key(1, 2)]
    assert (view.lost, view.broken, view.all_formed) == ((), (), True)


def test_a_newcomer_that_is_in_no_plan_warms_up() -> None:
    node = adopting(0, 1, 2)
    assert node.states == ["training", "training", "starting"]
    assert not node.all_of(act.StartWorker)
    newcomer = key(2, 9)
    node.feed(
        ev.WorkerConnected(newcomer),
        ev.WorkerBecameReady(newcomer, "host", 5002, "cpu", 0, 0, None),
    )
    assert node.states[2] == "ready"


@pytest.mark.parametrize(("kind", "state"), [("forced", "rebuilding"), ("planned", "training")])
def test_a_plan_that_had_not_formed_is_gone_on_with(kind: str, state: str) -> None:
    newer = plan(4, key(0, 4), key(1, 2), key(2, 9), kind=kind)
    node = adopting(0, 1, 2, newer=newer)
    assert node.states == [state, state, "ready"]
    node.feed(ev.WorkerConnected(key(0, 4)))
    assert node.all_of(act.SendPlan) == [act.SendPlan(key(0, 4), newer)]


def test_before_the_store_has_answered_an_adopted_worker_trains_and_is_told_and_allowed_nothing() -> (
    None
):
    script = NodeScript(2)
    script.state = node.without_lease(script.state)
    adopted = (ev.AdoptedWorker(key(0, 4), 1000), ev.AdoptedWorker(key(1, 2), 1001))
    script.feed(ev.PlanSeen(TRAINED), ev.JobSeen(job(formed=3)), ev.NodeStarted(adopted))
    script.feed(ev.WorkerConnected(key(0, 4)), ev.WorkerConnected(key(1, 2)))
    assert script.states == ["training", "training"]
    assert not script.orders
    assert permission.welcome(script.state, key(0, 4), 100.0) == (0, None)
    assert "past the deadline" in permission.commit_refusal(script.state, key(0, 4), 3, 100.0)
    script.feed(ev.LeaseKept(105.0))
    assert [order.key for order in script.all_of(act.SendPlan)] == [key(0, 4), key(1, 2)]
    assert permission.commit_refusal(script.state, key(0, 4), 3, 100.0) == ""


def test_one_that_says_hello_is_told_what_it_may_have_missed() -> None:
    node = adopting(0, 1).feed(ev.WorkerConnected(key(0, 4)))
    assert node.all_of(act.SendFormedMark) == [act.SendFormedMark(key(0, 4), 3)]
    node.wait()
    assert [order.key for order in node.all_of(act.KillWorker)] == [key(1, 2)]
    node.feed(ev.WorkerExited(key(1, 2), None, 9, ""))
    assert node.states[:2] == ["training", "starting"]
    assert node.all_of(act.StartWorker) == [act.StartWorker(key(1, 3))]


def test_one_that_is_gone_is_an_ordinary_loss() -> None:
    node = adopting(0, 1).feed(ev.WorkerExited(key(1, 2), None, None, "unknown"))
    written = node.all_of(act.WriteMember)[-1]
    assert survey([written.record], TRAINED, job(formed=3)).lost == (key(1, 2),)
    assert node.state.slots[1].failures == 0, "it had formed"


def test_a_stop_reaches_it_once_it_has_said_hello() -> None:
    node = adopting(0, 1).feed(ev.StopRequested("SIGTERM"))
    assert not node.all_of(act.SendStop)
    assert not [k for k in node.all_of(act.KillWorker) if k.key.slot < 2]
    node.feed(ev.WorkerConnected(key(0, 4)))
    assert [order.key for order in node.all_of(act.SendStop)] == [key(0, 4)]


def test_a_node_that_has_lost_its_directory_gives_no_name_of_before_again() -> None:
    """Else the leader would take its new worker for the one that it still has in the plan."""
    left = plan(2, key(1, 7)).members
    found = plan(3, key(0, 4), key(5, 9, "b"), left_out=left)
    script = NodeScript(3).feed(ev.PlanSeen(found), ev.JobSeen(job(formed=3)), ev.NodeStarted(()))
    assert script.all_of(act.StartWorker) == [
        act.StartWorker(key(0, 5)),
        act.StartWorker(key(1, 8)),
        act.StartWorker(key(2, 1)),
    ]
    written = script.all_of(act.WriteMember)[-1].record
    view = survey([written], found, job(formed=3))
    assert view.heirs == ()
    assert key(0, 4) in view.lost
