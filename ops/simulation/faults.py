"""What goes wrong, by name. Each fault knows how it ends, if it does."""

from collections.abc import Callable
from typing import Final

from rallypoint.daemon.core import events as ev
from rallypoint.ops.simulation import endings
from rallypoint.ops.simulation.cluster import Cluster
from rallypoint.ops.simulation.node import Node
from rallypoint.ops.simulation.scenario import DETECT_S, FAULTS
from rallypoint.ops.simulation.worker import Worker


class Faults:
    """Draws faults of a cluster's scenario, and mends everything at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._choose = cluster.choose
        self._part = 0
        self.mended = False
        """Nothing goes wrong any more."""
        self._odd = 0
        self.done: dict[str, int] = {}
        self.gone: set[int] = set()
        """Nodes that do not come back."""

    def begin(self) -> None:
        """Let faults come until `mend`."""
        self._next()

    def mend(self) -> None:
        """Nothing goes wrong any more: all links work, and what was down is started again, but for
        machines that a job can do without."""
        cluster = self._cluster
        self.mended = True
        cluster.log("--- from here on nothing goes wrong ---")
        cluster.parts.clear()
        cluster.etcd.cut.clear()
        cluster.etcd.start()
        cluster.dies_in_commit.clear()
        cluster.dies_in_forming.clear()
        for worker in cluster.living():
            worker.resume()
        if cluster.scenario.shared_checkpoints and self._choose.random() < 0.4:
            self._lose_for_good(self._choose.choice(cluster.nodes))
        for node in cluster.nodes:
            if not node.up:
                self._start_soon(node, 3.0)
        cluster.network_changed()

    def _lose_for_good(self, node: Node) -> None:
        scenario = self._cluster.scenario
        if scenario.workers - scenario.slots[node.index] >= scenario.min_workers:
            self._cluster.log(f"{node.name} is lost for good")
            self.gone.add(node.index)
            self._lose_machine(node)

    def _next(self) -> None:
        every_s = self._cluster.scenario.fault_every_s
        self._cluster.clock.after(self._choose.expovariate(1.0 / every_s), self._strike)

    def _strike(self) -> None:
        if self.mended:
            return
        self.do(self._choose.choice(self._cluster.scenario.faults))
        self._next()

    def do(self, name: str) -> None:
        """One fault of this name, where it is possible."""
        if _FAULTS[name](self):
            self.done[name] = self.done.get(name, 0) + 1
            self._cluster.log(f"FAULT {name}")

    # --- processes ---------------------------------------------------------------------------------

    def worker_killed(self) -> bool:
        """SIGKILL of a worker, or of several of one node."""
        worker = self._worker()
        if worker is not None:
            self._cluster.end(worker, "SIGKILL")
        return worker is not None

    def killed_in_commit(self) -> bool:
        """SIGKILL between the last collective of an iteration and the end of the barrier after it."""
        worker = self._worker()
        if worker is not None:
            self._cluster.dies_in_commit.add(worker.key)
        return worker is not None

    def killed_in_forming(self) -> bool:
        """SIGKILL while a generation forms: some members may have formed it, others not."""
        worker = self._worker()
        if worker is not None:
            self._cluster.dies_in_forming.add(worker.key)
        return worker is not None

    def worker_raises(self) -> bool:
        """An exception in one worker only: no error of the program, whatever it looks like there."""
        worker = self._worker()
        if worker is None or worker.stopped or not worker.connected:
            return False
        self._odd += 1
        endings.fault(worker, worker.state.iteration + 1, f"odd error {self._odd}", "Traceback")
        return True

    def worker_stopped(self) -> bool:
        """SIGSTOP of a worker, for a time or until it is ended for a hang."""
        worker = self._worker()
        if worker is None or worker.stopped:
            return False
        worker.stopped = True
        self._later(self._choose.uniform(1.0, 20.0), worker.resume)
        return True

    def supervisor_killed(self) -> bool:
        """SIGKILL of a supervisor only; the next one adopts its workers, or comes too late."""
        node = self._node()
        if node is None:
            return False
        node.stop()
        self._start_soon(node, self._choose.choice([1.0, 4.0, 14.0]))
        return True

    def node_killed(self) -> bool:
        """SIGKILL of a supervisor and all of its workers: the host answers, connections are closed."""
        node = self._node()
        if node is None:
            return False
        self._kill(node)
        self._start_soon(node, self._choose.choice([2.0, 15.0]))
        return True

    def _kill(self, node: Node) -> None:
        node.stop()
        for worker in self._cluster.workers_of(node):
            self._cluster.end(worker, "SIGKILL with its node")

    def machine_lost(self) -> bool:
        """No power: nothing answers, and no connection is closed."""
        node = self._node()
        if node is None:
            return False
        self._lose_machine(node)
        self._start_soon(node, self._choose.choice([8.0, 30.0]))
        return True

    def _lose_machine(self, node: Node) -> None:
        node.stop()
        node.machine, node.lost_s = False, self._cluster.clock.now
        for worker in self._cluster.workers_of(node):
            self._cluster.end(worker, "no power", silent=True)

    def all_nodes_lost(self) -> bool:
        """All at once, some without power; they come back one after the other."""
        up = [node for node in self._cluster.nodes if node.up]
        within_s = self._choose.choice([3.0, 25.0, 45.0])
        for node in up:
            if self._choose.random() < 0.5:
                self._lose_machine(node)
            else:
                self._kill(node)
            self._start_soon(node, within_s)
        return bool(up)

    def all_supervisors_killed(self) -> bool:
        """All supervisors at once, or within some seconds; their workers train on."""
        up = [node for node in self._cluster.nodes if node.up]
        within_s = self._choose.choice([0.0, 6.0])
        for node in up:

            def kill(node: Node = node) -> None:
                node.stop()
                self._start_soon(node, 4.0)

            self._later(self._choose.uniform(0.0, within_s), kill)
        return bool(up)

    def node_drained(self) -> bool:
        """The operator drains a node, and starts it again later."""
        node = self._node()
        if node is None or not node.state.started or len(self._cluster.nodes) < 2:
            return False
        deadline_s = self._choose.choice([None, 3.0, 20.0])
        if self._choose.choice(["drain", "notice"]) == "drain" or deadline_s is None:
            node.decide(ev.DrainRequested(deadline_s))
        else:
            node.decide(ev.NoticeReceived(self._cluster.clock.now + deadline_s, "simulated"))
        if deadline_s is not None:
            checks, life = self._cluster.checks, node.life
            late = lambda: checks.late_exit(node) if node.up and node.life == life else None
            self._cluster.clock.after(deadline_s, late)
        self._watch_drain(node)
        return True

    def _watch_drain(self, node: Node) -> None:
        life = node.life

        def look() -> None:
            if node.life == life:
                if node.up:
                    self._cluster.clock.after(2.0, look)
                else:
                    self._start_soon(node, 5.0)

        self._cluster.clock.after(2.0, look)

    # --- network -----------------------------------------------------------------------------------

    def cut_from_etcd(self) -> bool:
        """A node cannot reach etcd; the data plane works."""
        node = self._choose.choice(self._cluster.nodes)
        self._cluster.etcd.cut.add(node.index)
        self._later(self._choose.choice([1.0, 7.0, 25.0]), lambda: self._joined_again(node))
        return True

    def cut_off(self) -> bool:
        """A node reaches nobody."""
        node = self._choose.choice(self._cluster.nodes)
        self._part += 1
        self._cluster.parts[node.index] = self._part
        self._cluster.etcd.cut.add(node.index)
        self._later(self._choose.choice([1.0, 7.0, 25.0]), lambda: self._joined_again(node))
        return True

    def partition(self) -> bool:
        """The nodes fall into two parts; etcd is reached by one of them, or by both."""
        cluster = self._cluster
        self._part += 1
        away = [n for n in cluster.nodes if self._choose.random() < 0.5]
        both = self._choose.random() < 0.3
        self._divide(away)
        if not both:
            cluster.etcd.cut.update(node.index for node in away)
        seconds = self._choose.choice([1.0, 7.0, 25.0])
        self._later(seconds, lambda: self._joined_again(*away))
        return bool(away)

    def _divide(self, away: list[Node]) -> None:
        """These nodes reach each other alone; those that were in other parts before may do so anew."""
        cluster = self._cluster
        met = any(node.index in cluster.parts for node in away)
        cluster.parts.update(dict.fromkeys((node.index for node in away), self._part))
        if met:
            cluster.network_changed()

    def group_cut_off(self) -> bool:
        """All nodes of the newest formed generation reach neither etcd nor the rest, some of them losing a
        worker or their supervisors; the data plane comes back first."""
        cluster, choose = self._cluster, self._choose
        plan = cluster.checks.plans.get(cluster.checks.formed)
        away = [n for n in cluster.nodes if plan is not None and plan.lists(n.name)]
        if not away or len(away) == len(cluster.nodes):
            return False
        self._part += 1
        if choose.random() < 0.6:
            self._divide(away)
        cluster.etcd.cut.update(node.index for node in away)
        victims = [w for n in away for w in cluster.workers_of(n) if w.alive]
        if victims and choose.random() < 0.5:
            victim = choose.choice(victims)
            self._later(choose.uniform(0.0, 9.0), lambda: cluster.end(victim, "SIGKILL"))
        elif choose.random() < 0.5:
            others = [n for n in cluster.nodes if n not in away]
            self._later(choose.uniform(3.0, 7.0), lambda: self._kill_workers(others))
        self._later(choose.choice([2.0, 8.0]), lambda: self._link_again(*away))
        self._later(choose.choice([9.0, 20.0, 35.0]), lambda: self._reach_etcd_again(*away))
        return True

    def _kill_workers(self, nodes: list[Node]) -> None:
        for node in nodes:
            for worker in self._cluster.workers_of(node):
                self._cluster.end(worker, "SIGKILL")

    def left_behind(self) -> bool:
        """A node loses its lease while its workers live; then one of the others dies, and the rest while
        they form anew without it."""
        cluster = self._cluster
        group = cluster.groups.get(cluster.checks.formed)
        nodes = (
            list(dict.fromkeys(w.node for w in group.here.values())) if group is not None else []
        )
        if len(nodes) < 2:
            return False
        left = self._choose.choice(nodes)
        others = [w for w in group.here.values() if w.node is not left] if group else []
        cluster.etcd.cut.add(left.index)

        def strike() -> None:
            cluster.dies_in_forming.update(w.key for w in others[1:])
            cluster.end(others[0], "SIGKILL")

        self._later(DETECT_S + self._choose.uniform(0.0, 3.0), strike)
        self._later(self._choose.choice([12.0, 25.0]), lambda: self._joined_again(left))
        return True

    def _link_again(self, *nodes: Node) -> None:
        for node in nodes:
            self._cluster.parts.pop(node.index, None)
        self._cluster.network_changed()

    def _joined_again(self, *nodes: Node) -> None:
        for node in nodes:
            self._cluster.parts.pop(node.index, None)
        if self._choose.random() < 0.3:  # the data plane comes back first
            self._later(self._choose.uniform(0.0, 9.0), lambda: self._reach_etcd_again(*nodes))
            self._cluster.network_changed()
        else:
            self._reach_etcd_again(*nodes)

    def _reach_etcd_again(self, *nodes: Node) -> None:
        self._cluster.etcd.cut.difference_update(node.index for node in nodes)
        self._cluster.network_changed()

    # --- etcd --------------------------------------------------------------------------------------

    def etcd_down(self) -> bool:
        """No majority for a while."""
        return self._stop_etcd(self._choose.choice([4.0, 12.0, 30.0]))

    def etcd_leader_change(self) -> bool:
        """A new leader is elected."""
        return self._stop_etcd(self._choose.uniform(0.5, 2.8))

    def _stop_etcd(self, seconds: float) -> bool:
        etcd = self._cluster.etcd
        if not etcd.serves:
            return False

        def back() -> None:
            etcd.start()
            self._cluster.network_changed()

        etcd.stop()
        self._later(seconds, back)
        return True

    def compaction(self) -> bool:
        """Everything up to now is compacted: whoever has not read it reads anew."""
        self._cluster.etcd.keys.compact(self._cluster.etcd.keys.revision)
        return True

    def several_at_once(self) -> bool:
        """Two or three faults within 50 ms, or a second apart."""
        names = [n for n in self._cluster.scenario.faults if n != "several_at_once"]
        if not names:
            return False
        for _ in range(self._choose.choice([2, 2, 3])):
            name = self._choose.choice(names)
            delay_s = self._choose.choice([self._choose.uniform(0.0, 0.05), 1.0])
            self._later(delay_s, lambda n=name: self.do(n))  # type: ignore[misc]
        return True

    # --- small -------------------------------------------------------------------------------------

    def _later(self, delay_s: float, act: Callable[[], object]) -> None:
        def unless_over() -> None:
            if not self.mended:
                act()

        self._cluster.clock.after(delay_s, unless_over)

    def _start_soon(self, node: Node, within_s: float) -> None:
        def start() -> None:
            if not node.up and node.index not in self.gone:
                node.start()

        self._cluster.clock.after(self._choose.uniform(0.2, within_s), start)

    def stop_job(self) -> None:
        """The operator stops the job, on some node."""
        node = self._node()
        if node is not None:
            self.stop_on(node)

    def stop_on(self, node: Node) -> None:
        """The operator stops the job on this node, if its supervisor runs."""
        if node.up and node.state.started:
            self._cluster.log(f"the operator stops the job on {node.name}")
            node.asked_to_stop = True
            node.decide(ev.StopRequested("the operator"))

    def _node(self) -> Node | None:
        up = [node for node in self._cluster.nodes if node.up]
        return self._choose.choice(up) if up else None

    def _worker(self) -> Worker | None:
        living = self._cluster.living()
        return self._choose.choice(living) if living else None


_FAULTS: Final[dict[str, Callable[[Faults], bool]]] = {n: getattr(Faults, n) for n in FAULTS}
