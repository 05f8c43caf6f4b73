"""DESIGN §4, rule 11, after a total loss: what nobody has registered may be on a disk that is not here."""

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import permission
from tests.fakes.membership import LeaderScript, job, key, leader_policy, member, plan, slot_record

A, B = key(0), key(0, 1, "b")


def test_rule_11_progress_without_any_registered_checkpoint_waits_where_disks_are_local() -> None:
    """Its holder was cut off from the store when it committed: the job must not fail without it."""
    script = LeaderScript(leader_policy(alone=False, shared_checkpoints=False))
    script.elect(member(slot_record(0)), job_record=job(iteration=15, formed=4))
    script.now += 1000.0
    script.see(member(slot_record(0)))
    assert script.all_of(act.PublishPlan) == []
    assert script.all_of(act.SetJobState) == []
    holder = member(slot_record(0), node_name="b", checkpoint=(3, 10))
    script.see(member(slot_record(0)), holder)
    assert script.published.resumes
    assert B in script.ranks


def test_rule_11_progress_without_any_checkpoint_on_shared_storage_fails_the_job() -> None:
    script = LeaderScript(leader_policy(alone=False))
    script.elect(member(slot_record(0)), job_record=job(iteration=15, formed=4))
    (order,) = script.all_of(act.SetJobState)
    assert order.state == "failed"


def formed_and_lost() -> LeaderScript:
    """Generation 3 of a and b was marked formed while nobody registered a checkpoint, then all were lost; a is
    back."""
    script = LeaderScript(leader_policy(alone=False, shared_checkpoints=False))
    script.gone = {A, B}
    present = plan(3, A, B, survivors=(A, B))
    again = member(slot_record(0, incarnation=2))
    return script.elect(again, plan=present, job_record=job(formed=3))


def test_rule_11_who_may_hold_an_unregistered_checkpoint_is_waited_for() -> None:
    script = formed_and_lost()
    while "which may hold one" not in script.said:
        assert script.all_of(act.PublishPlan) == []
        script.wait()
    assert "waiting for b," in script.said
    again = member(slot_record(0, incarnation=2))
    holder = member(slot_record(0, incarnation=2), node_name="b", checkpoint=(3, 30))
    script.see(again, holder)
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.published.resumes
    assert "b" in [k.node for k in script.ranks]


def test_rule_11_without_recorded_progress_it_is_not_waited_for_ever() -> None:
    script = formed_and_lost()
    began_s = script.now
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.published.restore
    assert not script.published.resumes
    assert script.now >= began_s + 15.0


def test_rule_11_a_holder_cannot_come_while_the_store_is_away() -> None:
    script = formed_and_lost()
    script.feed(ev.JobChanged(job(formed=3, iteration=36, checkpoint=(3, 36))))
    script.now += 60.0
    back_s = script.now
    script.feed(ev.StoreReturned())
    script.see(member(slot_record(0, incarnation=2), checkpoint=(2, 15)))
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.now >= back_s + 15.0


def test_rule_11_nobody_is_waited_for_when_all_nodes_of_the_generation_read_nothing() -> None:
    script = formed_and_lost()
    began_s = script.now
    script.see(
        member(slot_record(0, incarnation=2)),
        member(slot_record(0, incarnation=2), node_name="b"),
    )
    while not script.all_of(act.PublishPlan):
        script.wait()
    assert script.now < began_s + 10.0


def test_rule_11_a_plan_from_scratch_is_not_written_once_progress_is_registered() -> None:
    """A leader decides before the record that it reads next: the holder came in between."""
    fresh, resuming = plan(4, A, restore=True), plan(4, A, restore=True, resumes=True)
    assert permission.from_scratch_refusal(fresh, job(formed=3)) == ""
    for begun in (job(iteration=8), job(checkpoint=(2, 0))):
        assert "would start from scratch" in permission.from_scratch_refusal(fresh, begun)
        assert permission.from_scratch_refusal(resuming, begun) == ""
