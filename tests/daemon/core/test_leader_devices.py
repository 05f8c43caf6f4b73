"""Two slots with one GPU: the second is refused with both named, and never placed in a plan."""

import pytest

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
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

GPU, OTHER = "gpu-1b4e28ba", "gpu-6fa459ea"


def test_at_a_start_the_first_to_be_ready_gets_the_device() -> None:
    script = LeaderScript(leader_policy())
    script.elect(
        member(
            slot_record(0, device=GPU, ready_order=2),
            slot_record(1, device=GPU, ready_order=1),
            slot_record(2, device=OTHER, ready_order=3),
        )
    )
    assert script.ranks == [key(1), key(2)], "at once: the refused one is not waited for"
    assert f"a/0#1 has the same device as a/1#1, {GPU}" in script.said
    assert "node.devices" in script.said


@pytest.mark.parametrize("device", ["", "cpu"])
def test_cpu_shares_are_nobodys_own(device: str) -> None:
    script = LeaderScript(leader_policy())
    script.elect(member(slot_record(0, device=device), slot_record(1, device=device)))
    assert script.ranks == [key(0), key(1)]
    assert "same device" not in script.said


def test_the_nodes_of_a_job_are_compared_with_each_other() -> None:
    script = LeaderScript(leader_policy())
    script.elect(
        member(slot_record(0, device=GPU)),
        member(slot_record(0, device=GPU), node_name="b"),
    )
    assert script.ranks == [key(0)]
    assert f"b/0#1 has the same device as a/0#1, {GPU}" in script.said


def train_with_one_refused() -> LeaderScript:
    script = LeaderScript(leader_policy())
    record = job(formed=3, iteration=20, restore_generation=1)
    present = plan(3, key(0), key(2), survivors=(key(0), key(2)))
    holders = trained(0, 3, device=GPU), trained(2, 3, device=OTHER)
    return script.elect(
        member(holders[0], slot_record(1, device=GPU), holders[1]), plan=present, job_record=record
    )


def test_a_newcomer_never_joins_with_the_device_of_a_member_and_that_is_said_once() -> None:
    script = train_with_one_refused()
    assert f"a/1#1 has the same device as a/0#1, {GPU}" in script.said
    assert script.state.timer_at_s is None, "nobody waits to be let in"
    script.now = 200.0
    script.feed(ev.TimerFired())
    assert script.orders == ()


def test_it_enters_when_the_device_is_free() -> None:
    script = train_with_one_refused()
    script.see(
        member(
            trained(0, 3, device=GPU, state="lost"),
            slot_record(1, device=GPU),
            trained(2, 3, device=OTHER),
        )
    ).wait()
    assert script.ranks == [key(2)]
    forced = script.published
    script.feed(ev.PlanChanged(forced))
    script.see(member(slot_record(1, device=GPU), trained(2, forced.generation, device=OTHER)))
    assert script.all_of(act.MarkFormed)
    script.feed(ev.JobChanged(job(formed=forced.generation, iteration=20, restore_generation=1)))
    script.wait()
    assert script.ranks == [key(2), key(1)]


def test_one_that_is_being_let_in_keeps_the_device_against_one_that_comes_later() -> None:
    script = LeaderScript(leader_policy())
    joining = plan(4, key(0), key(2), kind="planned", survivors=(key(0),))
    script.elect(
        member(
            trained(0, 3, device=OTHER),
            slot_record(1, device=GPU, ready_order=1),
            slot_record(2, device=GPU, ready_order=2),
        ),
        plan=joining,
        job_record=job(formed=3, iteration=20, restore_generation=1),
    )
    assert f"a/1#1 has the same device as a/2#1, {GPU}" in script.said
    assert script.all_of(act.PublishPlan) == []
