"""Several nodes lost or come at nearly the same moment: one change (DESIGN 4.4, 4.5)."""

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from tests.fakes.membership import (
    job,
    key,
    member,
    node_record,
    slot_record,
    trained,
    training_leader,
)

A, B, C = key(0), key(0, 1, "b"), key(0, 1, "c")


def test_rule_04_newcomers_of_several_nodes_within_the_window_are_one_change() -> None:
    script = training_leader(A)
    comes = {name: member(slot_record(0), node_name=name) for name in ("b", "c", "d")}
    began_s = script.now
    script.see(node_record("a"), comes["b"])
    script.now += 0.5
    script.see(node_record("a"), comes["b"], comes["c"])
    script.now += 0.4
    script.see(node_record("a"), *comes.values())
    assert script.all_of(act.PublishPlan) == []
    script.wait()
    assert script.now == began_s + script.policy.join_debounce_s
    assert script.ranks == [A, B, C, key(0, 1, "d")]
    assert (script.published.kind, script.published.survivors) == ("planned", (A,))


def test_rule_04_losses_of_two_nodes_within_50_ms_are_one_change() -> None:
    script = training_leader(A, B, C)
    gone = {name: member(trained(0, 3, state="lost"), node_name=name) for name in ("b", "c")}
    began_s = script.now
    script.see(node_record("a"), gone["b"], node_record("c"))
    script.now += 0.03
    script.see(node_record("a"), *gone.values())
    assert script.all_of(act.PublishPlan) == []
    script.wait()
    assert script.now == began_s + script.policy.coalesce_s
    assert (script.ranks, script.published.kind) == ([A], "forced")


def test_rule_05_the_job_holds_without_a_node_and_goes_on_when_it_is_back() -> None:
    script = training_leader(A, B, C, policy={"min_workers": 3})
    script.see(
        node_record("a"), node_record("b"), member(trained(0, 3, state="lost"), node_name="c")
    )
    held = script.wait().published
    assert (script.ranks, held.hold, held.survivors) == ([A, B], True, (A, B))
    script.feed(ev.PlanChanged(held))
    present = [node_record(name, held.generation) for name in ("a", "b")]
    script.see(*present)
    script.feed(ev.JobChanged(job(formed=held.generation, checkpoint=(held.generation, 0))))
    assert script.all_of(act.PublishPlan) == []
    back = member(slot_record(0, incarnation=2), node_name="c")
    script.see(*present, back).wait()
    resumed = script.published
    assert (resumed.kind, resumed.hold) == ("planned", False)
    assert script.ranks == [A, B, key(0, 2, "c")]
