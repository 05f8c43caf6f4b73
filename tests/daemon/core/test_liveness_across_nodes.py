"""Who hangs where the workers that wait for each other are on several nodes (DESIGN 4.9)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import liveness
from rallypoint.daemon.core.liveness import LivenessPolicy, LivenessState, Stuck, Verdict
from rallypoint.daemon.core.records import MemberRecord, WaitRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotCounters
from tests.fakes.membership import NodeScript, key, member, plan

POLICY = LivenessPolicy(hang_s=10.0, interval_s=1.0)
A, B, C = key(0), key(0, 1, "b"), key(0, 1, "c")


@dataclass
class OneNode:
    """Reads the page of its one worker each second, and the records of the others."""

    worker: WorkerKey
    state: LivenessState = field(default_factory=LivenessState)
    waits: tuple[WaitRecord, ...] = ()
    verdict: Verdict = ()
    page: dict[str, Any] = field(default_factory=dict)
    changes: int = 0
    """How often its record changed for this."""
    asked: int = 0
    """How often it needed the records of the others."""

    def record(self) -> MemberRecord:
        return member(node_name=self.worker.node, waits=self.waits)


class Cluster:
    """Nodes with one worker each, which train in generation 3. The leader knows the records of the others
    at any time; the others read them when `liveness.asks`."""

    leader = "a"

    def __init__(self, *workers: WorkerKey, present: Plan | None = None) -> None:
        self.now = 100.0
        self.plan = present or plan(3, *workers)
        self.nodes = {k: OneNode(k) for k in workers}
        self.put("update", 7, *workers)
        self.look()

    def put(
        self,
        phase: str,
        collective: int,
        *workers: WorkerKey,
        inside: bool = False,
        generation: int = 3,
    ) -> "Cluster":
        """These workers get on: they are here now."""
        for k in workers:
            self.nodes[k].page = {
                "incarnation": k.incarnation,
                "generation": generation,
                "iteration": 5,
                "phase": phase,
                "collective": collective,
                "inside": inside,
                "touched_ns": int(self.now * 1e9),
            }
        return self

    def read(self, seconds: int) -> Mapping[WorkerKey, Verdict]:
        """Time passes; the verdict of each node that has one."""
        for _ in range(seconds):
            self.now += 1.0
            self.look()
        return {k: node.verdict for k, node in self.nodes.items() if node.verdict}

    def look(self) -> None:
        zero: dict[str, Any] = {"collected_env_steps": 0, "optimiser_steps": 0, "env_builds": 1}
        records = [node.record() for node in self.nodes.values()]
        for k, node in self.nodes.items():
            asks = liveness.asks(node.state, POLICY, self.plan, self.leader)
            node.asked += asks
            others = [m for m in records if m.node != k.node and (asks or k.node == self.leader)]
            pages = {k: SlotCounters(**zero, **node.page)}
            node.state = liveness.observe(node.state, POLICY, pages, self.now, others)
            waits = liveness.waits(node.state, POLICY, (k,), node.waits)
            node.changes += waits != node.waits
            node.waits = waits
            node.verdict = liveness.judge(node.state, POLICY, (k,), self.plan)


def hung(verdicts: Mapping[WorkerKey, Verdict]) -> dict[WorkerKey, list[WorkerKey]]:
    """Whom each node would end."""
    found = {}
    for node, verdict in verdicts.items():
        assert isinstance(verdict, tuple)
        found[node] = [x.key for x in verdict]
    return found


def test_rule_09_the_only_worker_of_a_node_is_ended_by_its_own_node_for_a_wait_elsewhere() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, C, inside=True)
    assert nodes.read(10) == {}
    verdicts = nodes.read(1)
    assert hung(verdicts) == {B: [B]}
    (found,) = verdicts[B]  # type: ignore[misc]
    assert found.reason == (
        "hang: silent for 11.0 s in update (after collective 7 of generation 3), bound 10.0 s; "
        "a/0#1, c/0#1 wait"
    )


def test_rule_09_a_wait_is_said_once_and_taken_back_once() -> None:
    nodes = Cluster(A, B).put("update", 8, A, inside=True)
    for _ in range(8):
        nodes.put("rollout", 7, B)
        assert nodes.read(2) == {}
    (wait,) = nodes.nodes[A].waits
    assert (wait.slot, wait.generation, wait.collective) == (0, 3, 8)
    assert wait.waited_s >= POLICY.settle_s
    assert nodes.nodes[A].changes == 1
    nodes.put("update", 9, A, B).read(1)
    assert nodes.nodes[A].waits == ()
    assert nodes.nodes[A].changes == 2
    assert nodes.nodes[B].changes == 0


def test_rule_09_waits_that_are_usual_in_this_run_are_not_said() -> None:
    nodes = Cluster(A, B)
    said = []
    for collective in range(8, 14):
        nodes.put("update", collective, A, inside=True)
        for _ in range(4):
            nodes.put("rollout", collective - 1, B).read(1)
        said.append(bool(nodes.nodes[A].waits))
        nodes.put("update", collective, A, B).read(1)
    assert said == [True, False, False, False, False, False]
    nodes.put("update", 14, A, inside=True)
    assert hung(nodes.read(13)) == {B: [B]}, "but a hang is"


def test_rule_09_two_nodes_hang_and_each_ends_its_own() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, inside=True)
    assert hung(nodes.read(11)) == {B: [B], C: [C]}


def test_rule_09_who_has_entered_the_collective_is_not_ended_for_who_has_not() -> None:
    """B has left collective 8 (a broadcast, as its source), which C has not entered."""
    nodes = Cluster(A, B, C).put("update", 8, A, inside=True).put("update", 8, B)
    assert hung(nodes.read(20)) == {C: [C]}


def test_rule_09_who_was_stopped_while_it_entered_is_found_when_all_the_rest_waits() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, C, inside=True).put("update", 8, B)
    assert hung(nodes.read(11)) == {B: [B]}


def test_rule_09_all_inside_on_all_nodes_is_stuck_and_nobody_is_ended() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, B, C, inside=True)
    assert nodes.read(10) == {}
    verdicts = nodes.read(4)
    assert set(verdicts) == {A}, "whoever leads says it, and that is enough"
    for verdict in verdicts.values():
        assert isinstance(verdict, Stuck)
        assert verdict.generation == 3
        assert "bound 10.0 s" in verdict.reason


def test_rule_09_where_the_leader_has_no_worker_everybody_looks_whether_all_wait() -> None:
    nodes = Cluster(A, B, C)
    nodes.leader = "spare"
    assert nodes.put("update", 8, A, B, C, inside=True).read(10) == {}
    verdicts = nodes.read(4)
    assert set(verdicts) == {A, B, C}
    assert all(isinstance(verdict, Stuck) for verdict in verdicts.values())


def test_rule_09_one_node_that_says_nothing_keeps_the_others_from_calling_it_stuck() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, B, inside=True)
    for _ in range(20):
        nodes.put("rollout", 7, C)
        assert nodes.read(2) == {}


def test_rule_09_who_stays_in_a_wait_that_a_forced_plan_has_ended_elsewhere_is_hung() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, B, C, inside=True)
    nodes.read(14)
    nodes.plan = plan(4, A, B, C)
    nodes.put("arrive", 0, A, C, inside=True, generation=4)
    assert nodes.read(2) == {}, "it has some time to follow"
    assert hung(nodes.read(3)) == {B: [B]}


def test_rule_09_a_wait_that_is_long_over_ends_nobody() -> None:
    """The store is away: the last that others said stays, while all train on, and then stand."""
    nodes = Cluster(A, B).put("update", 8, A, inside=True)
    nodes.put("rollout", 7, B).read(5)
    stale = nodes.nodes[A].record()
    assert stale.waits
    nodes.put("update", 9, B)
    for _ in range(20):
        nodes.now += 1.0
        node = nodes.nodes[B]
        zero: dict[str, Any] = {"collected_env_steps": 0, "optimiser_steps": 0, "env_builds": 1}
        pages = {B: SlotCounters(**zero, **node.page)}
        node.state = liveness.observe(node.state, POLICY, pages, nodes.now, [stale])
        assert liveness.judge(node.state, POLICY, (B,), nodes.plan) == ()


def test_rule_09_a_node_says_in_its_record_who_waits() -> None:
    waits = (WaitRecord(0, 1, 3, 8, 2.5),)
    node = NodeScript().make_train(generation=3)
    node.feed(ev.WaitsChanged(waits))
    assert node.state.member is not None
    assert node.state.member.waits == waits
    assert node.feed(ev.WaitsChanged(())).state.record().waits == ()


def test_nobody_asks_for_the_records_of_others_while_all_get_on() -> None:
    nodes = Cluster(A, B, C)
    for collective in range(8, 30):
        nodes.put("update", collective, A, B, C, inside=bool(collective % 2)).read(1)
    assert [node.asked for node in nodes.nodes.values()] == [0, 0, 0]


def test_only_the_node_of_the_silent_worker_asks_for_the_records_of_others() -> None:
    nodes = Cluster(A, B, C).put("update", 8, A, C, inside=True)
    assert hung(nodes.read(11)) == {B: [B]}
    assert nodes.nodes[B].asked > 0
    assert nodes.nodes[C].asked == 0, "it waits, and the leader looks whether all do"
