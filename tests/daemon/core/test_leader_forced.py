"""The leader when somebody is gone: losses, retries, restoring, holding, refusals."""

from itertools import pairwise

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.errors import InvalidTransition
from rallypoint.daemon.shared.plan import WorkerKey
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


def _training(
    *slots: int, generation: int = 3, policy: dict[str, object] | None = None
) -> LeaderScript:
    """A leader whose job trains in these slots of node a."""
    keys = [key(slot) for slot in slots]
    present = plan(generation, *keys, survivors=tuple(keys))
    script = LeaderScript(leader_policy(**(policy or {})))
    return script.elect(
        member(*(trained(slot, generation) for slot in slots)),
        plan=present,
        job_record=job(formed=generation, iteration=20, restore_generation=1),
    )


def _published(script: LeaderScript) -> LeaderScript:
    """The store takes the plan."""
    return script.feed(ev.PlanChanged(script.published))


# --- losses (4.4) ----------------------------------------------------------------------------------


def test_rule_04_losses_within_the_window_are_one_change_after_a_probe() -> None:
    script = _training(0, 1, 2)
    script.see(member(trained(0, 3), trained(1, 3), slot_record(2, "starting", incarnation=2)))
    assert script.all_of(act.SetTimer) == [act.SetTimer(100.05)]
    script.now = 100.03
    lost = member(trained(0, 3), slot_record(1, "lost"), slot_record(2, "starting", incarnation=2))
    script.see(lost)
    assert script.all_of(act.ProbeMembers) == []
    script.wait()
    assert script.now == 100.05
    (probe,) = script.all_of(act.ProbeMembers)
    assert (probe.targets, probe.bound_s) == ((key(0),), 0.2)
    after = script.published
    assert (after.generation, after.kind, after.cause) == (4, "forced", "worker_lost")
    assert (script.ranks, after.survivors) == ([key(0)], (key(0),))
    assert (after.formed, after.restore, after.starts) == (3, False, "now")
    assert script.all_of(act.PublishPlan)[0].replaces == 3


def test_rule_04_a_forced_plan_leaves_out_who_does_not_answer() -> None:
    script = _training(0, 1, 2, 3)
    script.gone, script.silent = {key(1)}, {key(2)}
    script.see(member(*(trained(s, 3) for s in (0, 1, 2)), slot_record(3, "lost"))).wait()
    assert script.ranks == [key(0)]
    assert "a/1#1, a/2#1" in script.said


def test_rule_04_a_forced_plan_admits_no_newcomer_while_a_survivor_lives() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3), slot_record(1, incarnation=2), slot_record(2))).wait()
    assert script.ranks == [key(0)]


def test_rule_04_one_lost_node_is_named_as_the_cause() -> None:
    keys = (key(0), key(0, 1, "b"))
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 3)),
        member(trained(0, 3), node_name="b"),
        plan=plan(3, *keys, survivors=keys),
        job_record=job(formed=3),
    )
    script.gone = {key(0, 1, "b")}
    script.see(member(trained(0, 3))).wait()
    assert script.published.cause == "node_lost"


def test_rule_03_ranks_of_survivors_follow_seniority() -> None:
    script = _training(2, 0, 1)
    script.see(member(trained(0, 3), trained(1, 3), slot_record(2, "lost"))).wait()
    assert script.ranks == [key(0), key(1)]
    _published(script)
    script.see(member(trained(0, 4), slot_record(1, "lost"), slot_record(2, incarnation=2)))
    assert script.wait().ranks == [key(0)]


def test_rule_03_a_heir_behind_the_newest_generation_ranks_after_the_survivors() -> None:
    keys = (key(0), key(1), key(2))
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 3), trained(1, 4), slot_record(2, "lost")),
        plan=plan(4, *keys, survivors=keys),
        job_record=job(formed=3),
    )
    script.wait()
    assert script.ranks == [key(1), key(0)]


def test_rule_04_what_was_formed_before_the_mark_counts_no_more() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3), slot_record(1, "lost"), trained(2, 2, state="ready"))).wait()
    assert script.ranks == [key(0)]


def test_a_loss_that_is_over_at_the_end_of_the_window_is_none() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3, broken_generation=3), trained(1, 3)))
    timer_s = script.state.timer_at_s
    assert timer_s == 100.05
    script.feed(ev.PlanChanged(plan(4, key(0), key(1), survivors=(key(0), key(1)))))
    script.now = 100.1
    script.feed(ev.TimerFired())
    assert script.all_of(act.ProbeMembers) == []


# --- retries ---------------------------------------------------------------------------------------


def test_rule_01_a_broken_generation_of_the_living_is_tried_again_under_a_new_number() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3, broken_generation=3), trained(1, 3))).wait()
    assert (script.published.generation, script.ranks) == (4, [key(0), key(1)])


def test_retries_back_off_so_that_they_cannot_spin() -> None:
    script = _training(0, 1)
    moments = []
    for generation in range(3, 12):
        slots = (trained(s, 3, broken_generation=generation) for s in (0, 1))
        script.see(member(*slots)).wait()
        if not script.all_of(act.PublishPlan):
            script.wait()
        moments.append(script.now)
        _published(script)
    gaps = [round(after - before, 6) for before, after in pairwise(moments)]
    assert gaps == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_a_formed_generation_ends_the_back_off() -> None:
    script = _training(0, 1)
    for generation in (3, 4, 5):
        script.see(member(*(trained(s, 3, broken_generation=generation) for s in (0, 1)))).wait()
        _published(script)
    assert script.state.retries == 2
    script.see(member(trained(0, 6), trained(1, 6)))
    script.feed(ev.JobChanged(job(formed=6)))
    assert script.state.retries == 0


def test_a_retry_without_a_loss_keeps_the_cause_of_the_plan_that_never_formed() -> None:
    script = LeaderScript(leader_policy()).elect(member(slot_record(0), slot_record(1)))
    _published(script)
    script.now += 2
    script.see(member(*(slot_record(s, broken_generation=1) for s in (0, 1))))
    again = script.published
    assert (again.generation, again.cause, again.restore) == (2, "start", True)


@pytest.mark.parametrize(
    ("kind", "cause"), [("gone", "worker_lost"), ("silent", "hang")], ids=["gone", "silent"]
)
def test_rule_09_a_probe_tells_a_dead_worker_from_a_hung_one(kind: str, cause: str) -> None:
    script = _training(0, 1)
    getattr(script, kind).add(key(1))
    script.see(member(trained(0, 3, broken_generation=3), trained(1, 3))).wait()
    assert (script.ranks, script.published.cause) == ([key(0)], cause)


def test_rule_09_a_worker_that_its_node_ends_for_a_hang_is_one_also_where_its_peers_notice_first() -> (
    None
):
    script = _training(0, 1)
    script.gone = {key(1)}
    hung = trained(1, 3, hung_incarnation=1)
    script.see(member(trained(0, 3, broken_generation=3), hung)).wait()
    assert (script.ranks, script.published.cause) == ([key(0)], "hang")


def test_silent_survivors_are_asked_again_and_never_replaced_by_a_restore() -> None:
    script = _training(0, 1)
    script.silent = {key(0)}
    script.see(member(trained(0, 3), slot_record(1, incarnation=2), slot_record(2))).wait()
    assert script.all_of(act.PublishPlan) == []
    assert "no survivor answers" in script.said
    script.silent = set()
    script.wait()
    assert script.now == pytest.approx(101.05)
    assert script.ranks == [key(0)]


# --- nobody left -----------------------------------------------------------------------------------


def test_rule_04_without_a_survivor_the_job_restores_with_those_that_are_ready() -> None:
    script = _training(0, 1)
    script.see(member(slot_record(0, "starting", incarnation=2), slot_record(1, "lost")))
    assert script.all_of(act.PublishPlan) == []
    script.see(member(slot_record(0, incarnation=2, checkpoint=(3, 20)), slot_record(1, "lost")))
    restored = script.published
    assert (restored.restore, restored.commit_first, restored.cause) == (True, True, "worker_lost")
    assert script.ranks == [key(0, 2)]


def test_rule_11_a_checkpoint_known_from_a_lost_worker_is_state() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3, checkpoint=(3, 20)), slot_record(1, checkpoint=None)))
    script.see(member(slot_record(0, "lost"), slot_record(1, incarnation=2)))
    assert script.published.restore


def test_rule_04_no_restore_while_a_worker_of_the_old_plan_still_answers() -> None:
    old = key(0, 1, "b")
    script = LeaderScript(leader_policy()).elect(
        member(slot_record(0)),
        plan=plan(3, old, survivors=(old,)),
        job_record=job(formed=3),
    )
    assert script.all_of(act.PublishPlan) == []
    assert "b/0#1 have no lease, but take part: nothing is changed" in script.said
    script.gone = {old}
    script.wait()
    assert script.now == 101.0
    assert script.published.restore


def test_a_store_that_lost_its_plan_is_repaired_from_the_survivors() -> None:
    script = LeaderScript(leader_policy())
    script.elect(member(trained(0, 7), trained(1, 7), slot_record(2)), job_record=job(formed=7))
    assert (script.published.generation, script.published.cause) == (8, "store")
    assert script.published.survivors == (key(0), key(1))


# --- holding (4.5) ---------------------------------------------------------------------------------


def test_rule_05_below_min_workers_the_survivors_hold() -> None:
    script = _training(0, 1, policy={"min_workers": 2})
    script.see(member(trained(0, 3), slot_record(1, "starting", incarnation=2))).wait()
    assert (script.published.hold, script.ranks) == (True, [key(0)])
    assert "holding" in script.said


def test_rule_05_a_held_job_goes_on_with_enough_newcomers() -> None:
    held = plan(4, key(0), survivors=(key(0),), hold=True)
    script = LeaderScript(leader_policy(min_workers=3)).elect(
        member(trained(0, 4, state="waiting"), slot_record(1, incarnation=2)),
        plan=held,
        job_record=job(formed=4),
    )
    assert script.all_of(act.PublishPlan) == []
    assert "the job holds below 3" in script.said
    assert script.state.timer_at_s is None
    script.see(
        member(trained(0, 4, state="waiting"), slot_record(1, incarnation=2), slot_record(2))
    ).wait()
    after = script.published
    assert (after.kind, after.cause, after.hold) == ("planned", "join", False)
    assert script.ranks == [key(0), key(1, 2), key(2)]


# --- what is written, and what is not ------------------------------------------------------------


def test_rule_01_one_plan_at_a_time_is_written() -> None:
    script = _training(0, 1, 2)
    script.see(member(trained(0, 3), trained(1, 3), slot_record(2, "lost"))).wait()
    first = script.published
    script.now += 1
    script.see(member(trained(0, 3), slot_record(1, "lost"), slot_record(2, "lost")))
    assert script.orders == ()
    script.feed(ev.PlanChanged(first)).wait()
    assert (script.published.generation, script.ranks) == (5, [key(0)])


def test_rule_07_a_refused_plan_is_tried_again_after_a_back_off_under_a_new_number() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3), slot_record(1, "lost"))).wait()
    script.feed(ev.PublishRefused(4, "the store does not answer"))
    assert "the store does not answer" in script.said
    assert script.all_of(act.PublishPlan) == []
    script.wait()
    assert script.published.generation == 5


def test_rule_07_a_refused_mark_is_tried_again() -> None:
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 1)), plan=plan(1, key(0)), job_record=job()
    )
    assert script.all_of(act.MarkFormed) == [act.MarkFormed(1)]
    script.feed(ev.PublishRefused(1, "the store does not answer"))
    assert script.all_of(act.MarkFormed) == []
    assert script.wait().all_of(act.MarkFormed) == [act.MarkFormed(1)]


def test_an_answer_to_an_older_probe_is_only_explained() -> None:
    script = _training(0, 1)
    script.see(member(trained(0, 3), slot_record(1, "lost"))).wait()
    script.feed(ev.ProbeAnswered(1, (key(0),), (), ()))
    assert [type(order) for order in script.orders] == [act.Explain]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ev.ProbeAnswered(9, (), (), ()), "probe 9, never sent"),
        (ev.PlanChanged(plan(3, key(0))), "two different plans of generation 3"),
        (ev.JobChanged(job(formed=2)), "fell from 3 to 2"),
    ],
    ids=["probe", "plan", "mark"],
)
def test_an_unlisted_event_raises(event: ev.LeaderEvent, words: str) -> None:
    with pytest.raises(InvalidTransition, match=words) as caught:
        _training(0, 1).feed(event)
    assert len(caught.value.recent) == 2


def test_nothing_is_decided_before_the_election() -> None:
    with pytest.raises(InvalidTransition, match="before the election"):
        LeaderScript(leader_policy()).see(member(slot_record(0)))


def test_a_wait_is_explained_once() -> None:
    script = LeaderScript(leader_policy(min_workers=2)).elect(member(slot_record(0)))
    assert script.said
    script.see(member(slot_record(0)))
    assert script.orders == ()


def test_rule_07_a_new_leader_goes_on_from_the_store() -> None:
    keys: tuple[WorkerKey, ...] = (key(0), key(1))
    script = LeaderScript(leader_policy()).elect(
        member(trained(0, 5), trained(1, 5)),
        plan=plan(5, *keys, survivors=keys),
        job_record=job(formed=4),
        newest=5,
    )
    assert script.orders == (act.MarkFormed(5),)
