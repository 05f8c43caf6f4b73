"""The whole simulated cluster: nodes, network, processes, and the store between them."""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import planning
from rallypoint.daemon.executors.store import Put, WatchEvent
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.ops.simulation import keys
from rallypoint.ops.simulation.checkpoints import Checkpoint, Checkpoints
from rallypoint.ops.simulation.checks import Checks
from rallypoint.ops.simulation.clock import Clock
from rallypoint.ops.simulation.etcd import Etcd
from rallypoint.ops.simulation.group import Group
from rallypoint.ops.simulation.node import Node
from rallypoint.ops.simulation.scenario import ORPHAN_GRACE_S, Scenario
from rallypoint.ops.simulation.worker import Worker

_WARM_UP_S = (0.5, 3.0)
_HELLO_S = (0.05, 0.3)


class Cluster:
    """``trace`` takes one line per thing that happens; None: nothing is written."""

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.trace = trace
        self.choose = random.Random(scenario.seed)  # noqa: S311 - reproducible, nothing secret
        self.clock = Clock()
        self.checks = Checks(self)
        self.etcd = Etcd(self.clock, self.choose, scenario, self._store_changed)
        self.checkpoints = Checkpoints(self)
        self.workers: dict[WorkerKey, Worker] = {}
        self.groups: dict[int, Group] = {}
        self.newest_generation = 0
        self.dies_in_commit: set[WorkerKey] = set()
        """Workers that a fault lets die at the end of their next iteration."""
        self.dies_in_forming: set[WorkerKey] = set()
        """The same while their next generation is being formed."""
        self.linked_since_s = self.clock.now
        """When a link was restored last."""
        self.parts: dict[int, int] = {}
        """Which part of a divided network a node is in; 0 where it says nothing."""
        self.leaders: set[Node] = set()
        """Nodes that take themselves for the leader."""
        self.nodes = [Node(self, index) for index in range(len(scenario.slots))]
        self._by_node: dict[int, list[Worker]] = {node.index: [] for node in self.nodes}

    def start(self) -> None:
        """Start every supervisor, within a second."""
        for node in self.nodes:
            self.clock.after(self.choose.uniform(0.0, 1.0), node.start)
        self._look()

    def _look(self) -> None:
        self.checks.look()
        self.clock.after(1.0, self._look)

    def log(self, text: str) -> None:
        """One line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.clock.now:9.3f} {text}")

    # --- time and network ---------------------------------------------------------------------------

    def delay_s(self) -> float:
        """Of a message between machines."""
        return self.choose.uniform(0.0005, self.scenario.message_s)

    def local_s(self) -> float:
        """Of a message between a supervisor and its worker."""
        return self.choose.uniform(0.0002, 0.003)

    def linked(self, a: Node, b: Node) -> bool:
        """Whether two machines reach each other."""
        return a is b or (
            a.machine and b.machine and self.parts.get(a.index, 0) == self.parts.get(b.index, 0)
        )

    def together(self, nodes: Sequence[Node]) -> bool:
        """Whether all of these machines reach each other."""
        return all(self.linked(nodes[0], node) for node in nodes)

    def network_changed(self) -> None:
        """Links have come back: groups may go on, watches continue."""
        self.linked_since_s = self.clock.now
        for group in list(self.groups.values()):
            if group.here:
                group.go_on()
        for node in self.nodes:
            node.pull()

    def probe(self, node: Node, key: WorkerKey) -> Literal["answering", "gone", "silent"]:
        """What a connection to this worker's own port finds."""
        worker = self.workers[key]
        if not self.linked(node, worker.node):
            return "silent"
        return "answering" if worker.alive else "gone"

    # --- processes ----------------------------------------------------------------------------------

    def spawn(self, node: Node, key: WorkerKey) -> None:
        """Start the process of a slot's next life."""
        self.checks.spawned(node, key)
        worker = self.workers[key] = Worker(self, node, key)
        mine = [w for w in self._by_node[node.index] if not w.reaped]
        self._by_node[node.index] = [*mine, worker]
        worker.said_until_s = (
            self.clock.now + self.local_s()
        )  # its end is not seen before its start
        self.clock.after(
            worker.said_until_s - self.clock.now,
            node.alive(lambda: node.decide(ev.WorkerSpawned(key, 1))),
        )
        self.clock.after(self.choose.uniform(*_HELLO_S), worker.greet)
        self.clock.after(0.4 + self.choose.uniform(*_WARM_UP_S), worker.boot)

    def end(
        self, worker: Worker, why: str, code: int | None = None, *, silent: bool = False
    ) -> None:
        """The process is gone; its supervisor, if it runs, sees that at once."""
        if not worker.alive:
            return
        worker.alive = False
        self.log(f"{worker.key} ends: {why}")
        if worker.group is not None:
            worker.group.leave(worker, why, silent=silent)
        self.report_end(worker, why, code)

    def report_end(self, worker: Worker, why: str, code: int | None = None) -> None:
        """After its last words the supervisor hears of the end."""
        if worker.node.up and worker.node.state.started and not worker.reaped:
            worker.reaped = True
            signal = 9 if code is None else None
            at_s = max(worker.said_until_s, self.clock.now + self.local_s())
            event = ev.WorkerExited(worker.key, code, signal, why)
            node = worker.node
            self.clock.after(at_s - self.clock.now, node.alive(lambda: node.decide(event)))

    def tell(self, node: Node, key: WorkerKey, say: Callable[[Worker], None]) -> None:
        """From a supervisor to its worker, in order."""
        worker = self.workers[key]
        at_s = max(worker.told_until_s, self.clock.now + self.local_s())
        worker.told_until_s = at_s
        self.clock.after(at_s - self.clock.now, lambda: worker.told(say))

    def unsupervised(self, node: Node) -> None:
        """Its supervisor is gone: workers train on for a while."""
        for worker in self.workers_of(node):
            worker.connected = False
            life = node.life

            def orphaned(worker: Worker = worker, life: int = life) -> None:
                if worker.alive and not worker.connected and not (node.up and node.life > life):
                    self.end(worker, "orphaned")

            self.clock.after(ORPHAN_GRACE_S, orphaned)

    def adopt(self, node: Node, worker: Worker) -> None:
        """A worker of an earlier supervisor says Hello to the new one, or is found dead."""
        if worker.alive:
            self.clock.after(self.choose.uniform(*_HELLO_S), worker.greet)
        else:
            self.report_end(worker, "died before it was adopted")

    def exited(self, node: Node, code: int, reason: str) -> None:
        """A supervisor ends in good order: it gives up its lease, and its workers are gone."""
        if node.lease is not None and self.etcd.reaches(node.index):
            self.etcd.keys.revoke(node.lease)
            self.etcd.tell()
        for worker in self.workers_of(node):
            self.end(worker, "its node ends")
        node.stop()
        self.checks.exited(node, code, reason)

    def workers_of(self, node: Node) -> list[Worker]:
        """Processes of a node that it does not know to be gone."""
        return [w for w in self._by_node[node.index] if not w.reaped]

    def living(self) -> list[Worker]:
        """All processes that run."""
        return [w for workers in self._by_node.values() for w in workers if w.alive]

    # --- generations --------------------------------------------------------------------------------

    def group(self, plan: Plan) -> Group:
        """The group of a generation."""
        found = self.groups.get(plan.generation)
        if found is None:
            found = self.groups[plan.generation] = Group(self, plan)
        return found

    def readable(self, node: Node) -> Checkpoint | None:
        """The newest checkpoint that workers of this node can read."""
        return self.checkpoints.readable(node)

    def leader(self) -> Node | None:
        """Whoever is in the leader's key."""
        item = self.etcd.keys.get(keys.LEADER)
        return None if item is None else self.nodes[int(item.value.decode()[1:])]

    def witness(self, members: Sequence[Worker]) -> None:
        """Collectives of a generation end: leaders that have a member see it."""
        for node in dict.fromkeys(w.node for w in members):
            node.leading.decide(ev.CollectivesEnded(members[0].last_formed))

    # --- the store ----------------------------------------------------------------------------------

    def _store_changed(self, events: tuple[WatchEvent, ...]) -> None:
        everybody = False
        for event in events:
            key = event.item.key if isinstance(event, Put) else event.key
            everybody = everybody or not key.startswith(keys.MEMBERS)
            if isinstance(event, Put) and key == keys.GENERATION:
                plan = keys.plan_of(event.item)
                self.checks.published(plan)
                self.newest_generation = plan.generation
                if self.trace is not None:
                    self.log(f"PLAN {plan.generation} {plan.kind} {plan.cause}: {_shown(plan)}")
            elif isinstance(event, Put) and key == keys.JOB:
                self.checks.job_written(keys.job_of(event.item))
            elif key.startswith(keys.MEMBERS):
                self._record_changed(key.removeprefix(keys.MEMBERS), event)
            if self.trace is not None and key not in (keys.GENERATION, keys.JOB):
                self.log(f"store: {key.removeprefix(keys.PREFIX)} {type(event).__name__}")
        for node in self.nodes if everybody else sorted(self.leaders, key=lambda n: n.index):
            node.pull()

    def _record_changed(self, name: str, event: WatchEvent) -> None:
        found = None
        if isinstance(event, Put):
            found = planning.readable_checkpoint(keys.member_of(event.item))
        self.nodes[int(name[1:])].unlisted_s = None if isinstance(event, Put) else self.clock.now
        self.checks.registers(name, found)


def _shown(plan: Plan) -> str:
    flags = [name for name in ("restore", "hold", "commit_first") if getattr(plan, name)]
    members = " ".join(f"{m.key}{'' if m.key in plan.survivor_keys else '+'}" for m in plan.members)
    left = " ".join(str(m.key) for m in plan.left_out)
    return f"{members} {flags} formed {plan.formed}" + (f", left out {left}" if left else "")
