"""One node: starting, restarting and describing its workers, and what it says to them."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.errors import RECENT_EVENTS, InvalidTransition
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes.membership import NodeScript, job, key, plan


def test_start_begins_one_life_per_slot_above_the_first_incarnation() -> None:
    node = NodeScript(2).feed(ev.NodeStarted())
    assert node.all_of(act.StartWorker) == [act.StartWorker(key(0)), act.StartWorker(key(1))]
    (written,) = node.all_of(act.WriteMember)
    assert [slot.state for slot in written.record.slots] == ["starting", "starting"]


def test_a_worker_goes_from_starting_over_warming_and_ready_to_training() -> None:
    node = NodeScript(1).feed(ev.NodeStarted())
    seen = [node.states[0]]
    for event in (
        ev.WorkerSpawned(key(0), 1000),
        ev.WorkerConnected(key(0)),
        ev.WorkerBecameReady(key(0), "host", 5000, "cpu", 64, 0, (3, 40)),
        ev.PlanSeen(plan(1, key(0))),
        ev.WorkerFormed(key(0), 1, "hash", 40),
    ):
        node.feed(event)
        seen.append(node.states[0])
    assert seen == ["starting", "starting", "warming", "ready", "ready", "training"]
    slot = node.state.slots[0]
    assert (slot.pid, slot.rank, slot.blocks, slot.committed_iteration) == (1000, 0, (0, 1), 40)
    record = slot.record()
    assert (record.last_formed, record.checkpoint, record.capacity_envs) == (1, (3, 40), 64)


def test_ready_order_counts_up_as_workers_become_ready() -> None:
    node = NodeScript(2).feed(ev.NodeStarted()).make_ready(1, 0)
    assert [slot.ready_order for slot in node.state.slots] == [2, 1]
    node.exit(1).make_ready(1)
    assert [slot.ready_order for slot in node.state.slots] == [2, 3]


def test_the_member_record_is_written_when_it_changes_never_per_iteration() -> None:
    node = NodeScript(1).make_train()
    node.feed(ev.WorkerCommitted(key(0), 1, 1, 640), ev.WorkerCommitted(key(0), 1, 2, 1280))
    assert node.orders == ()
    assert node.state.slots[0].committed_iteration == 2
    node.feed(ev.WorkerCheckpointed(key(0), 1, 2))
    (written,) = node.all_of(act.WriteMember)
    assert written.record.slots[0].checkpoint == (1, 2)
    node.feed(ev.WorkerCheckpointed(key(0), 1, 1))
    assert node.orders == ()


# --- restarts (DESIGN 4.8: a change of membership spends no failure budget) -----------------------


def test_rule_08_a_worker_that_had_formed_restarts_at_once_however_often() -> None:
    node = NodeScript(1).make_train()
    for generation in range(2, 9):
        node.exit(0)
        assert node.all_of(act.StartWorker) == [act.StartWorker(key(0, generation))]
        node.make_ready(0).feed(ev.PlanSeen(plan(generation, node.key(0))))
        node.feed(ev.WorkerFormed(node.key(0), generation, "hash", 0))
    assert node.state.slots[0].restarts == 7


def test_rule_08_lives_that_end_before_they_form_are_backed_off() -> None:
    node = NodeScript(1).feed(ev.NodeStarted())
    delays = []
    for _ in range(10):
        node.exit(0)
        delay_s = 0.0
        if not node.all_of(act.StartWorker):
            assert node.states == ["lost"]
            asked_s = node.now
            node.wait()
            delay_s = node.now - asked_s
        assert len(node.all_of(act.StartWorker)) == 1
        delays.append(delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_rule_08_a_committed_iteration_ends_the_back_off() -> None:
    node = NodeScript(1).feed(ev.NodeStarted()).exit(0).exit(0).wait()
    assert node.state.slots[0].failures == 2
    node.make_ready(0).feed(ev.PlanSeen(plan(1, node.key(0))))
    node.feed(ev.WorkerFormed(node.key(0), 1, "hash", 0), ev.WorkerCommitted(node.key(0), 1, 1, 8))
    assert node.state.slots[0].failures == 0
    node.exit(0).exit(0)
    assert node.all_of(act.StartWorker) == [act.StartWorker(node.key(0))]


def test_rule_08_a_process_that_cannot_be_started_is_backed_off_too() -> None:
    node = NodeScript(1).feed(ev.NodeStarted())
    node.feed(ev.SpawnFailed(key(0), "no memory"))
    assert node.all_of(act.StartWorker) == [act.StartWorker(key(0, 2))]
    node.feed(ev.SpawnFailed(key(0, 2), "no memory"))
    assert node.all_of(act.StartWorker) == []
    assert "no memory" in node.all_of(act.Explain)[0].reason
    assert node.all_of(act.SetTimer) == [act.SetTimer(node.now + 0.5)]


def test_the_timer_of_an_early_wake_is_asked_for_again() -> None:
    node = NodeScript(1).feed(ev.NodeStarted()).exit(0).exit(0)
    (timer,) = node.all_of(act.SetTimer)
    node.feed(ev.TimerFired())
    assert node.all_of(act.SetTimer) == [timer]


def test_a_new_life_begins_with_nothing_of_the_old_one() -> None:
    node = NodeScript(1).make_train().feed(ev.WorkerBroke(key(0), 1, "closed")).exit(0)
    record = node.state.slots[0].record()
    assert (record.incarnation, record.state, record.last_formed) == (2, "starting", 0)
    assert (record.broken_generation, record.blocks, record.port) == (0, (), 0)


# --- plans and marks ---------------------------------------------------------------------------


def test_a_plan_goes_to_its_connected_workers_only() -> None:
    node = NodeScript(3).feed(ev.NodeStarted()).make_ready(0, 1)
    first = plan(1, key(0), key(1), key(2))
    node.feed(ev.PlanSeen(first))
    assert node.all_of(act.SendPlan) == [act.SendPlan(key(0), first), act.SendPlan(key(1), first)]
    node.feed(ev.WorkerSpawned(key(2), 1), ev.WorkerConnected(key(2)))
    assert node.all_of(act.SendPlan) == []  # it warms up; a plan cannot list it yet


def test_a_reconnecting_worker_gets_the_plan_and_the_mark_again() -> None:
    node = NodeScript(1).make_train()
    node.feed(ev.WorkerConnected(key(0)))
    assert node.all_of(act.SendPlan) == [act.SendPlan(key(0), plan(1, key(0)))]
    assert node.all_of(act.SendFormedMark) == [act.SendFormedMark(key(0), 1)]
    assert node.states == ["training"]


def test_who_is_left_out_by_force_is_told_and_waits_ready() -> None:
    node = NodeScript(2).make_train()
    smaller = plan(2, key(0))
    node.feed(ev.PlanSeen(smaller))
    assert node.all_of(act.SendPlan) == [
        act.SendPlan(key(0), smaller),
        act.SendPlan(key(1), smaller),
    ]
    assert node.states == ["rebuilding", "ready"]
    assert [slot.rank for slot in node.state.slots] == [0, None]


def test_who_is_left_out_of_a_planned_change_trains_until_that_has_formed() -> None:
    node = NodeScript(2).make_train()
    node.feed(ev.PlanSeen(plan(2, key(0), kind="planned")))
    assert node.states == ["training", "training"]
    node.feed(ev.WorkerFormed(key(0), 2, "hash", 5), ev.JobSeen(job(formed=2)))
    assert node.states == ["training", "ready"]


def test_a_holding_generation_shows_its_workers_waiting() -> None:
    assert NodeScript(1).make_train(hold=True).states == ["waiting"]


def test_the_formed_mark_goes_to_those_that_formed_and_to_later_reports() -> None:
    node = NodeScript(2).feed(ev.NodeStarted()).make_ready(0, 1)
    node.feed(ev.PlanSeen(plan(1, key(0), key(1))), ev.WorkerFormed(key(0), 1, "hash", 0))
    assert node.all_of(act.SendFormedMark) == []
    node.feed(ev.JobSeen(job(formed=1)))
    assert node.all_of(act.SendFormedMark) == [act.SendFormedMark(key(0), 1)]
    node.feed(ev.WorkerFormed(key(1), 1, "hash", 0))
    assert node.all_of(act.SendFormedMark) == [act.SendFormedMark(key(1), 1)]
    node.feed(ev.JobSeen(job(formed=1, iteration=3)))
    assert node.all_of(act.SendFormedMark) == []


def test_a_broken_generation_is_recorded_while_the_worker_lives() -> None:
    node = NodeScript(2).make_train().feed(ev.WorkerBroke(key(0), 1, "connection closed"))
    assert node.states == ["rebuilding", "training"]
    assert node.state.slots[0].record().broken_generation == 1


def test_a_late_report_of_an_older_generation_changes_no_state() -> None:
    node = NodeScript(1).make_train().feed(ev.PlanSeen(plan(2, key(0))))
    node.feed(ev.WorkerFormed(key(0), 2, "hash", 0), ev.WorkerBroke(key(0), 1, "closed"))
    assert node.states == ["training"]


# --- program errors ------------------------------------------------------------------------------


def _fault(
    worker: WorkerKey, iteration: int = 7, fingerprint: str = "E at f:1"
) -> ev.WorkerFaulted:
    return ev.WorkerFaulted(worker, 1, iteration, fingerprint, "Traceback" + "x" * 9000)


def test_rule_08_a_fault_stays_in_the_record_of_the_next_life_and_is_counted() -> None:
    node = NodeScript(1).make_train().feed(_fault(key(0))).exit(0)
    fault = node.state.slots[0].record().fault
    assert fault is not None
    assert (fault.incarnation, fault.iteration, fault.times) == (1, 7, 1)
    assert len(fault.traceback) == 4000
    node.make_ready(0).feed(_fault(node.key(0)))
    again = node.state.slots[0].record().fault
    assert again is not None
    assert again.times == 2


@pytest.mark.parametrize("other", [(8, "E at f:1"), (7, "E at f:2")], ids=["iteration", "place"])
def test_rule_08_another_fault_counts_from_one(other: tuple[int, str]) -> None:
    node = NodeScript(1).make_train().feed(_fault(key(0))).exit(0).make_ready(0)
    node.feed(_fault(node.key(0), *other))
    fault = node.state.slots[0].fault
    assert fault is not None
    assert fault.times == 1


def test_rule_08_a_slot_that_gets_past_its_fault_forgets_it() -> None:
    node = NodeScript(1).make_train().feed(_fault(key(0))).exit(0).make_ready(0)
    node.feed(ev.PlanSeen(plan(2, node.key(0))), ev.WorkerFormed(node.key(0), 2, "hash", 6))
    node.feed(ev.WorkerCommitted(node.key(0), 2, 7, 0))
    assert node.state.slots[0].fault is not None
    node.feed(ev.WorkerCommitted(node.key(0), 2, 8, 0))
    assert node.state.slots[0].fault is None


# --- what is not listed ------------------------------------------------------------------------


def test_events_of_an_older_life_are_ordinary_and_only_explained() -> None:
    node = NodeScript(1).make_train().exit(0)
    before = node.states
    for event in (
        ev.WorkerBroke(key(0), 1, "closed"),
        ev.WorkerExited(key(0), None, 9, ""),
        ev.WorkerLeft(key(0), 3, "finished"),
    ):
        node.feed(event)
        (order,) = node.orders
        assert isinstance(order, act.Explain)
        assert "incarnation 2" in order.reason
    assert node.states == before


def test_words_of_a_dead_worker_that_arrive_late_are_only_explained() -> None:
    node = NodeScript(1).feed(ev.NodeStarted()).exit(0).exit(0)
    assert node.states == ["lost"]
    node.feed(ev.WorkerConnected(node.key(0)))
    assert [type(order) for order in node.orders] == [act.Explain]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ev.WorkerHung(key(0), "hang: silent"), "'starting'"),
        (ev.WorkerConnected(key(0, 2)), "incarnation 1"),
        (ev.WorkerConnected(key(5)), "no slot of node 'a'"),
        (ev.WorkerConnected(key(0, 1, "b")), "no slot of node 'a'"),
        (ev.NodeStarted(), "twice"),
    ],
    ids=["hung-before-ready", "future-life", "slot", "node", "start"],
)
def test_an_unlisted_event_raises_with_what_came_before(event: ev.NodeEvent, words: str) -> None:
    node = NodeScript(1).feed(ev.NodeStarted())
    with pytest.raises(InvalidTransition, match=words) as caught:
        node.feed(event)
    assert [e for _, e in caught.value.recent] == [ev.NodeStarted(), event]
    assert "NodeStarted(adopted=())" in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        ev.WorkerBecameReady(key(0), "h", 1, "cpu", 0, 0, None),
        ev.WorkerFormed(key(0), 1, "hash", 0),
        ev.WorkerCommitted(key(0), 1, 1, 8),
        ev.WorkerBroke(key(0), 1, "lost"),
        ev.WorkerLeft(key(0), 1, "finished"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_worker_that_says_what_may_not_stand_there_is_ended_and_nobody_else(
    said: ev.NodeEvent,
) -> None:
    node = NodeScript(2).feed(ev.NodeStarted(), ev.WorkerSpawned(key(0), 7), said)
    (order,) = node.all_of(act.KillWorker)
    assert (order.key, order.why) == (key(0), "protocol")
    assert "'starting'" in order.reason
    node.feed(said)
    assert [type(order) for order in node.orders] == [act.Explain], "it is not listened to any more"
    node.exit(0)
    assert node.states == ["starting", "starting"]
    assert node.state.slots[0].incarnation == 2
    assert node.state.slots[0].failures == 1, "a life that failed: it is backed off if it goes on"


def test_a_worker_that_formed_what_no_plan_has_is_ended() -> None:
    node = NodeScript(2).make_train().feed(ev.PlanSeen(plan(2, key(0))))
    for formed in (ev.WorkerFormed(key(1), 2, "hash", 0), ev.WorkerFormed(key(0), 3, "hash", 0)):
        node.feed(formed)
        (order,) = node.all_of(act.KillWorker)
        assert order.key == formed.key
        assert "no plan seen has it" in order.reason


def test_rule_08_a_trained_worker_that_breaks_the_protocol_again_and_again_is_backed_off() -> None:
    node = NodeScript(1).make_train()
    for generation in range(2, 5):
        node.feed(ev.WorkerMisbehaved(node.key(0), "garbage")).exit(0)
        if not node.all_of(act.StartWorker):
            break
        node.make_ready(0).feed(ev.PlanSeen(plan(generation, node.key(0))))
        node.feed(ev.WorkerFormed(node.key(0), generation, "hash", 0))
    assert node.state.slots[0].failures == 2
    assert node.states == ["lost"], "it waits for the end of its back-off"


def test_rule_01_a_plan_is_never_edited() -> None:
    node = NodeScript(2).make_train()
    node.feed(ev.PlanSeen(plan(1, key(0), key(1))))
    assert [type(order) for order in node.orders] == [act.Explain]
    with pytest.raises(InvalidTransition, match="two different plans of generation 1"):
        node.feed(ev.PlanSeen(plan(1, key(0))))


def test_the_event_log_is_bounded() -> None:
    node = NodeScript(1).make_train()
    for iteration in range(3 * RECENT_EVENTS):
        node.feed(ev.WorkerCommitted(key(0), 1, iteration, 0))
    assert len(node.state.recent) == RECENT_EVENTS
