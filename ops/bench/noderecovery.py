"""``rallypoint bench recovery --nodes N``: whole nodes of one job are lost, each with one worker.

Real supervisors meet on a real etcd. A node is *killed* (SIGKILL of its supervisor and of everything
that it started), or falls *silent* (its cable is pulled: a network namespace of its own, as root). The
clock runs as in `recovery`, from right before the blow to the first optimiser step of the last survivor.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rallypoint.ops.bench import network, nodepeer
from rallypoint.ops.bench.etcd import EtcdServer
from rallypoint.ops.bench.job import START_BOUND_S, Job
from rallypoint.ops.bench.network import LOOPBACK, Network, Place
from rallypoint.ops.bench.nodepeer import PeerLoss
from rallypoint.ops.bench.processes import BenchError, Deadline
from rallypoint.ops.bench.recovery import CALM_S, RECOVERY_BOUND_S, RETURN_BOUND_S

Drill = Literal["killed", "silent"]
DRILLS: Final[tuple[Drill, ...]] = ("killed", "silent")
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class NodeLoss:
    """One lost node and what came of it."""

    drill: Drill
    detect_s: float
    node: str
    rank: int
    """Of its worker."""
    total_s: float | None
    """Until the last survivor's next optimiser step; None: not within `RECOVERY_BOUND_S`."""
    generation: int | None
    survivors_kept: bool
    """The survivors' workers are the processes that they were."""
    back_s: float | None
    """Until all train together again, after the node was started again."""


@dataclass(frozen=True)
class NodeRun:
    """All losses of one job."""

    losses: tuple[NodeLoss, ...]
    error: str | None = None
    """Why it ended before all were dealt."""


def node_names(count: int) -> list[str]:
    """``n0``, ``n1``, …"""
    return [f"n{number}" for number in range(count)]


@contextmanager
def places(names: Sequence[str]) -> Iterator[tuple[dict[str, Place], Network | None]]:
    """A place for each node and for ``hub``, where the etcd server is, and the network between them;
    where none can be made, loopback for all."""
    if not network.possible():
        yield dict.fromkeys((*names, "hub"), LOOPBACK), None
        return
    with Network(names) as net:
        yield {**net.places, "hub": net.hub}, net


def measure(
    directory: Path,
    nodes: int,
    *,
    losses: int,
    detect_s: float,
    settings: Sequence[str],
    seed: int,
    show: Callable[[NodeLoss], None],
) -> NodeRun:
    """Run a job of ``nodes`` nodes, and deal ``losses`` of each drill, in turn; no silent ones where no
    network can be made."""
    names = node_names(nodes)
    with places(names) as (where, net), ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(directory / "etcd", where["hub"]))
        own = [
            *("job.iterations=none", f"job.max_workers={nodes}", f"membership.detect_s={detect_s}"),
            *etcd.settings,
        ]
        jobs = {
            name: stack.enter_context(
                Job(_made(directory / name), 1, [*own, *_at(name, place), *settings], place)
            )
            for name, place in where.items()
            if name != "hub"
        }
        run = _Run(jobs, net, detect_s, random.Random(seed))  # noqa: S311 - draws victims
        drills = [drill for _ in range(losses) for drill in (DRILLS if net else DRILLS[:1])]
        return run.deal(drills, show)


def measure_peer(directory: Path, nodes: int, drill: Drill) -> PeerLoss:
    """The same drill on one agent of torchrun for each node. Raises `BenchError` when it does not even
    begin to train, or needs a network that cannot be made."""
    names = node_names(nodes)
    with places(names) as (where, net):
        if drill == "silent" and net is None:
            raise BenchError("a silent node needs network namespaces: root, and iproute2")
        cut = None if net is None or drill == "killed" else net.cut
        return nodepeer.measure(directory, [where[name] for name in names], names, cut)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _at(name: str, place: Place) -> list[str]:
    return [
        *(f"node.name={name}", f"node.bind={place.address}", f"node.advertise={place.address}"),
        f"node.interface={place.interface}",
    ]


class _Run:
    """A job under way."""

    def __init__(
        self, jobs: dict[str, Job], net: Network | None, detect_s: float, rng: random.Random
    ) -> None:
        self._jobs = jobs
        self._net = net
        self._detect_s = detect_s
        self._rng = rng

    def deal(self, drills: Sequence[Drill], show: Callable[[NodeLoss], None]) -> NodeRun:
        """Deal the blows; ends at the first one that is not recovered from."""
        done: list[NodeLoss] = []
        try:
            self._together(START_BOUND_S)
            for drill in drills:
                done.append(self._lose(drill))
                show(done[-1])
                if done[-1].total_s is None:
                    return NodeRun(tuple(done), f"no step within {RECOVERY_BOUND_S:g} s")
        except BenchError as error:
            return NodeRun(tuple(done), str(error))
        return NodeRun(tuple(done))

    def _lose(self, drill: Drill) -> NodeLoss:
        before = self._together(RETURN_BOUND_S)
        time.sleep(self._rng.uniform(*CALM_S))
        victim = self._rng.choice(sorted(self._jobs))
        lost, others = self._jobs[victim], {n: j for n, j in self._jobs.items() if n != victim}
        generation = max(status["generation"] for status in before.values())
        blow_s = time.monotonic()
        if drill == "silent" and self._net is not None:
            self._net.cut(victim)
        else:
            lost.kill_all()
        lines = _next_steps(others, generation, blow_s)
        if lines is None:
            return NodeLoss(drill, self._detect_s, victim, -1, None, None, False, None)
        total_s = max(worker["at_s"] for line in lines for worker in line["stepped"]) - blow_s
        if drill == "silent" and self._net is not None:
            lost.kill_all()
            self._net.heal(victim)
        lost.start()
        after = self._together(RETURN_BOUND_S)
        return NodeLoss(
            drill=drill,
            detect_s=self._detect_s,
            node=victim,
            rank=_mine(before[victim], victim)["rank"],
            total_s=total_s,
            generation=max(line["generation"] for line in lines),
            survivors_kept=all(
                _mine(before[name], name)["pid"] == _mine(after[name], name)["pid"]
                for name in others
            ),
            back_s=time.monotonic() - blow_s,
        )

    def _together(self, bound_s: float) -> dict[str, dict[str, Any]]:
        """The status of every node, once all train in one generation."""
        count = len(self._jobs)

        def complete(status: dict[str, Any]) -> bool:
            ranked = [w for w in status["workers"] if w["rank"] is not None]
            return (
                status["world_size"] == count
                and [w["state"] for w in ranked] == ["training"] * count
                and status["last_change"]["seconds"]["total"] is not None
            )

        what = f"training with {count} nodes"
        found = {n: job.wait_for(what, complete, bound_s) for n, job in self._jobs.items()}
        for job in self._jobs.values():
            job.journal.read()
        return found


def _next_steps(
    jobs: dict[str, Job], generation: int, blow_s: float
) -> list[dict[str, Any]] | None:
    """Each node's line of the journal about the same later generation; None: not in time."""
    found: dict[str, dict[str, Any]] = {}
    log = next(iter(jobs.values())).log
    deadline = Deadline("the next step", blow_s + RECOVERY_BOUND_S - time.monotonic(), log)
    while True:
        for name, job in jobs.items():
            for line in job.journal.read():
                if line["event"] == "recovery" and line["generation"] > generation:
                    found[name] = line
        if len(found) == len(jobs) and len({x["generation"] for x in found.values()}) == 1:
            return list(found.values())
        try:
            deadline.check()
        except BenchError:
            return None
        time.sleep(_POLL_S)


def _mine(status: dict[str, Any], node: str) -> dict[str, Any]:
    """A node's only worker, as the node itself shows it."""
    worker: dict[str, Any]
    (worker,) = (w for w in status["workers"] if w["node"] == node)
    return worker
