"""``rallypoint bench membership``: many light supervisors on one real etcd, nodes of which are lost.

A light supervisor is the membership code of a real one in one of a few processes, its worker a
listening port (`lightnode`). All times are CLOCK_MONOTONIC of this host. What etcd did is taken from
its own /metrics, less what it does in the same time while nothing happens.
"""

import contextlib
import os
import random
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Final, Literal, Self, cast

import msgspec

from rallypoint.ops.bench import processes
from rallypoint.ops.bench.etcd import EtcdServer
from rallypoint.ops.bench.lightnode import Fact
from rallypoint.ops.bench.nodeprocess import Order, Reach, Report, node_name
from rallypoint.ops.bench.processes import BenchError

Kind = Literal["lease ends", "node dies", "leader dies"]
KINDS: Final[tuple[Kind, ...]] = ("lease ends", "node dies", "leader dies")
"""lease ends: the node's keys go, as when its lease runs out. node dies: its ports close, and every
other worker reports a closed connection, as after a SIGKILL of all of the node. leader dies: the same
of the leader's node."""
BOUND_S: Final = 300.0
"""Of anything that is waited for."""
NODES_PER_PROCESS: Final = 10
"""At least so many; a process for each CPU otherwise."""
_POLL_S: Final = 0.05
_CALM_S: Final = 1.5
"""Before each change: what the one before it leaves to do is over by then."""
_RECEIVED: Final = "etcd_network_client_grpc_received_bytes_total"
_SENT: Final = "etcd_network_client_grpc_sent_bytes_total"
_WATCH: Final = "grpc_server_msg_sent_total/Watch"
_CPU: Final = "process_cpu_seconds_total"
REQUESTS: Final = ("Range", "Put", "Txn", "LeaseGrant", "LeaseRevoke")


@dataclass(frozen=True)
class Traffic:
    """What etcd did for its clients in some time."""

    requests: float
    """Reads, writes and transactions, without keepalives."""
    watch_messages: float
    bytes_in: float
    bytes_out: float
    cpu_s: float

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Self:
        """The difference of two readings of `EtcdServer.counters`."""

        def grown(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        requests = sum(grown(f"grpc_server_handled_total/{name}") for name in REQUESTS)
        return cls(requests, grown(_WATCH), grown(_RECEIVED), grown(_SENT), grown(_CPU))

    def less(self, idle: "Traffic", seconds: float) -> "Traffic":
        """Without what ``idle`` (per second) makes up in this time."""
        pairs = zip(astuple(self), astuple(idle), strict=True)
        return Traffic(*(max(0.0, all_ - rate * seconds) for all_, rate in pairs))


@dataclass(frozen=True)
class Loss:
    """One loss of a node and its return."""

    kind: Kind
    node: str
    published_s: float
    """From the loss to the first node that has the plan without it."""
    planned_s: float
    """To the last one."""
    marked_s: float
    """To the last node that knows that all have formed."""
    nodes_cpu_s: float
    """CPU time of all nodes together until then, less what they use at rest."""
    traffic: Traffic
    rejoin_traffic: Traffic


@dataclass
class Size:
    """Everything measured with one number of nodes."""

    nodes: int
    processes: int
    start_s: float = 0.0
    """From the start of the first node to a generation of all of them, marked formed everywhere."""
    plan_bytes: int = 0
    idle_s: float = 0.0
    node_cpu: float = 0.0
    """CPU time of one idle supervisor per second."""
    idle: Traffic = field(default_factory=lambda: Traffic(0.0, 0.0, 0.0, 0.0, 0.0))
    """Per second, of all nodes together."""
    losses: list[Loss] = field(default_factory=list)


class NodesProcess:
    """One process of nodes, from ``with`` to the end of the block."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log

    def __enter__(self) -> Self:
        self._process = processes.start(self._command, self._log, pipes=True)
        self._orders = cast("IO[bytes]", self._process.stdin)
        self._reports = cast("IO[bytes]", self._process.stdout)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # its nodes have nothing to say good-bye to
        self._process.wait()
        self._reports.close()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def send(self, order: Order) -> None:
        """Give an order; its report must be taken before the next one."""
        try:
            self._orders.write(msgspec.json.encode(order) + b"\n")
            self._orders.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def take(self) -> Report:
        """The report. Raises `BenchError` when none comes."""
        if not select.select([self._reports], [], [], BOUND_S)[0]:
            raise BenchError(f"no report within {BOUND_S:g} s; see {self._log}")
        line = self._reports.readline()
        if not line:
            raise self._ended()
        return msgspec.json.decode(line, type=Report)

    def _ended(self) -> BenchError:
        return BenchError(f"the nodes of {self._log} ended:\n{processes.tail(self._log, 15)}")


class Run:
    """A cluster of nodes under way."""

    def __init__(self, etcd: EtcdServer, size: Size, nodes: Sequence[NodesProcess]) -> None:
        self._etcd = etcd
        self._size = size
        self._nodes = nodes
        self._per_process = -(-size.nodes // len(nodes))

    def start(self) -> None:
        """Start every node, and wait until all are in one generation."""
        begin_s = time.monotonic()
        self._all(Order("start"))
        self._until_together(0, self._size.nodes)
        self._size.start_s = time.monotonic() - begin_s
        self._size.plan_bytes = max(report.plan_bytes for report in self._all(Order("report")))

    def rest(self, seconds: float) -> None:
        """Measure what nodes and etcd use while nothing happens."""
        time.sleep(_CALM_S)
        before, counters = self._all(Order("report")), self._etcd.counters()
        time.sleep(seconds)
        after, later = self._all(Order("report")), self._etcd.counters()
        pairs = list(zip(before, after, strict=True))
        size, passed_s = self._size, after[0].at_s - before[0].at_s
        size.idle_s = passed_s
        size.node_cpu = sum(b.cpu_s - a.cpu_s for a, b in pairs) / passed_s / size.nodes
        values = astuple(Traffic.between(counters, later))
        size.idle = Traffic(*(value / passed_s for value in values))

    def lose(self, kind: Kind, rng: random.Random) -> Loss:
        """Lose a node, wait until the others are in a generation without it, and let it come back."""
        time.sleep(_CALM_S)
        leader = next(r.leader for r in self._all(Order("report")) if r.leader)
        names = [node_name(n) for n in range(self._size.nodes)]
        names.remove(leader)
        victim = leader if kind == "leader dies" else rng.choice(names)
        generation = self._newest("plan")
        self._all(Order("forget", generation=generation))
        at_s, counters, index = time.monotonic(), self._etcd.counters(), int(victim[1:])
        cpu_s = self._cpu_s()
        silently = kind != "lease ends"
        home = self._nodes[index // self._per_process]
        home.send(Order("lose", node=victim, silently=silently))
        loss_s = home.take().at_s
        if silently:
            self._all(Order("break", generation=generation))
        plan, mark = self._until_together(generation, self._size.nodes - 1)
        traffic = self._traffic_since(counters, at_s)
        rest_s = (time.monotonic() - at_s) * self._size.node_cpu * self._size.nodes
        cpu_s = max(0.0, self._cpu_s() - cpu_s - rest_s)
        at_s, counters = time.monotonic(), self._etcd.counters()
        home.send(Order("start", node=victim))
        home.take()
        self._until_together(self._newest("plan"), self._size.nodes)
        return Loss(
            kind=kind,
            node=victim,
            published_s=plan.first_s - loss_s,
            planned_s=plan.last_s - loss_s,
            marked_s=mark.last_s - loss_s,
            nodes_cpu_s=cpu_s,
            traffic=traffic,
            rejoin_traffic=self._traffic_since(counters, at_s),
        )

    def _traffic_since(self, counters: Mapping[str, float], at_s: float) -> Traffic:
        found = Traffic.between(counters, self._etcd.counters())
        return found.less(self._size.idle, time.monotonic() - at_s)

    def _until_together(self, generation: int, count: int) -> tuple[Reach, Reach]:
        """Wait until ``count`` nodes have a plan of all of them that is newer than ``generation``, and
        know that it has formed."""
        deadline_s = time.monotonic() + BOUND_S
        while time.monotonic() < deadline_s:
            reports = self._all(Order("report"))
            plan, mark = _merged(reports, "plan"), _merged(reports, "mark")
            for number, reach in plan.items():
                marked = mark.get(number)
                if number <= generation or marked is None:
                    continue
                if reach.world_size == count and min(reach.count, marked.count) >= count:
                    return reach, marked
            time.sleep(_POLL_S)
        newest = max(plan, default=0)
        raise BenchError(
            f"{count} nodes were not together within {BOUND_S:g} s; generation {newest}: plan "
            f"{plan.get(newest)}, mark {mark.get(newest)}; see {self._etcd.log.parent.parent}"
        )

    def _cpu_s(self) -> float:
        return sum(report.cpu_s for report in self._all(Order("report")))

    def _newest(self, fact: Fact) -> int:
        return max(_merged(self._all(Order("report")), fact))

    def _all(self, order: Order) -> list[Report]:
        for process in self._nodes:
            process.send(order)
        return [process.take() for process in self._nodes]


def _merged(reports: Sequence[Report], fact: Fact) -> dict[int, Reach]:
    """What all processes together have seen."""
    found: dict[int, Reach] = {}
    for report in reports:
        for generation, reach in (report.plan if fact == "plan" else report.mark).items():
            before = found.get(generation)
            if before is None:
                found[generation] = reach
                continue
            found[generation] = Reach(
                world_size=max(before.world_size, reach.world_size),
                count=before.count + reach.count,
                first_s=min(before.first_s, reach.first_s),
                last_s=max(before.last_s, reach.last_s),
            )
    return found


def measure(
    directory: Path,
    nodes: int,
    *,
    losses: int,
    idle_s: float,
    settings: Sequence[str],
    seed: int,
    show: Callable[[int, Loss], None],
) -> Size:
    """Run ``nodes`` nodes; idle for ``idle_s``, then ``losses`` losses of each kind, in turn."""
    rng = random.Random(seed)  # noqa: S311 - draws victims, no secret
    count = max(1, min(os.cpu_count() or 1, nodes // NODES_PER_PROCESS))
    size, per_process = Size(nodes, count), -(-nodes // count)
    with EtcdServer(directory / "etcd") as etcd, ExitStack() as stack:
        own = [
            *("job.name=bench", f"job.max_workers={nodes}", "node.workers=1"),
            *("log.level=warning", "log.format=json", *etcd.settings),
        ]
        members = [
            stack.enter_context(
                NodesProcess(
                    [
                        *(sys.executable, "-m", "rallypoint.ops.bench.nodeprocess"),
                        *(str(directory), str(first), str(min(per_process, nodes - first))),
                        *own,
                        *settings,
                    ],
                    directory / f"nodes-{first}.log",
                )
            )
            for first in range(0, nodes, per_process)
        ]
        run = Run(etcd, size, members)
        run.start()
        run.rest(idle_s)
        for _ in range(losses):
            for kind in KINDS:
                size.losses.append(run.lose(kind, rng))
                show(nodes, size.losses[-1])
    return size
