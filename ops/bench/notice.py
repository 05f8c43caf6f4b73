"""``rallypoint bench notice``: preemption notices in a real job of several nodes, and what they cost the
others: env steps that are lost, and how long they stand still.

Each node is a supervisor with one worker, membership is on a real etcd. The stall is measured from
outside, by the times of committed iterations in a survivor's journal, and stands beside what the
survivors themselves report (`rallypoint_change_stall_seconds`).
"""

import math
import random
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient
from rallypoint.daemon.core.ending import EXIT_NOTICE
from rallypoint.ops.bench.etcd import EtcdServer
from rallypoint.ops.bench.job import START_BOUND_S, Job
from rallypoint.ops.bench.noderecovery import node_names
from rallypoint.ops.bench.recovery import entry_stalls

LEFT_S: Final = 30.0
"""What each notice gives, as most clouds do."""
_BOUND_S: Final = 120.0
_CALM_ITERATIONS: Final = 6
"""Committed by all before each notice, so that an ordinary iteration is known."""


@dataclass(frozen=True)
class Noticed:
    """One notice and what came of it."""

    node: str
    exit_code: int
    left_after_s: float
    """From the notice to the end of its supervisor."""
    env_steps_lost: float
    """On all nodes that stayed."""
    survivors_kept: bool
    """Every worker that stayed is the process that it was."""


class Nodes:
    """A job of nodes ``n0``, ``n1``, …, each with a worker and a directory of its own."""

    def __init__(self, directory: Path, count: int, etcd: EtcdServer, settings: Sequence[str]):
        common = [*etcd.settings, f"job.max_workers={count}", "job.iterations=none", *settings]
        self.jobs = {
            name: Job(directory / name, 1, [*common, f"node.name={name}"])
            for name in node_names(count)
        }

    def complete(self, status: Mapping[str, Any]) -> bool:
        """All of them train in one generation."""
        ranked = [w for w in status["workers"] if w["rank"] is not None]
        return (
            status["world_size"] == len(self.jobs)
            and len(ranked) == len(self.jobs)
            and all(worker["state"] == "training" for worker in ranked)
        )

    def settle(self) -> int:
        """Wait until all train and have committed some iterations more; the newest of them. Raises
        `BenchError`."""
        goal = 0
        for job in self.jobs.values():
            status = job.wait_for("all nodes to train", self.complete, START_BOUND_S)
            goal = max(goal, status["iteration"] + _CALM_ITERATIONS)
        for job in self.jobs.values():
            job.wait_for(
                f"iteration {goal}", lambda s: self.complete(s) and s["iteration"] >= goal, _BOUND_S
            )
        return goal

    def pids(self, names: Sequence[str]) -> dict[str, Any]:
        """The processes of these nodes' workers."""
        found = {}
        for name in names:
            status = self.jobs[name].wait_for("an answer", lambda s: True, _BOUND_S)
            found[name] = next(w["pid"] for w in status["workers"] if w["node"] == name)
        return found


def measure(
    directory: Path,
    *,
    nodes: int,
    notices: int,
    seed: int,
    settings: Sequence[str],
    show: Callable[[Noticed], None],
) -> dict[str, Any]:
    """The document of a run with ``notices`` notices, each to a node of the draw. Raises `BenchError`."""
    rng = random.Random(seed)  # noqa: S311 - draws victims, no secret
    done: list[Noticed] = []
    with EtcdServer(directory / "etcd") as etcd, ExitStack() as stack:
        job = Nodes(directory, nodes, etcd, settings)
        for name, one in job.jobs.items():
            (directory / name).mkdir()
            stack.enter_context(one)
        stays = f"n{rng.randrange(nodes)}"  # its journal has all of the run
        for _ in range(notices):
            job.settle()
            victim = rng.choice([name for name in job.jobs if name != stays])
            done.append(_notice(job, victim))
            show(done[-1])
            job.jobs[victim].start()
        job.settle()
        journal = job.jobs[stays].journal
        journal.read()
        reported = _sample(job.jobs[stays], 'change_stall_seconds_sum{cause="notice"}')
        return _document(done, entry_stalls(journal.lines, "notice"), reported)


def _notice(job: Nodes, victim: str) -> Noticed:
    staying = [name for name in job.jobs if name != victim]
    pids = job.pids(staying)
    lost = sum(_lost(job.jobs[name]) for name in staying)
    with AdminClient(job.jobs[victim].rundir.path) as client:
        client.ask(command="notice", deadline_s=LEFT_S)
        code, took_s = job.jobs[victim].wait_for_exit(LEFT_S + _BOUND_S)
    for name in staying:
        job.jobs[name].wait_for(
            f"{name} to train without {victim}",
            lambda s: s["world_size"] == len(staying) and s["state"] == "running",
            _BOUND_S,
        )
    return Noticed(
        node=victim,
        exit_code=code,
        left_after_s=took_s,
        env_steps_lost=sum(_lost(job.jobs[name]) for name in staying) - lost,
        survivors_kept=job.pids(staying) == pids,
    )


def _lost(job: Job) -> float:
    return _sample(job, "env_steps_lost_total")


def _sample(job: Job, name: str) -> float:
    """The sum of all samples whose name begins so."""
    url = job.wait_for("an answer", lambda s: True, _BOUND_S)["metrics_url"]
    with urllib.request.urlopen(url, timeout=_BOUND_S) as answer:  # noqa: S310 - our own address
        lines = answer.read().decode().splitlines()
    wanted = f"rallypoint_{name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


def _document(
    done: Sequence[Noticed], stalls_s: Sequence[float], reported_s: float
) -> dict[str, Any]:
    held = all(
        n.exit_code == EXIT_NOTICE
        and n.left_after_s <= LEFT_S
        and n.env_steps_lost == 0
        and n.survivors_kept
        for n in done
    )
    ordered = sorted(stalls_s)
    return {
        "notices": [asdict(n) for n in done],
        "held": held,
        "env_steps_lost": sum(n.env_steps_lost for n in done),
        "left_after_s": max((n.left_after_s for n in done), default=None),
        "stall_s": {
            "count": len(ordered),
            "p50": median(ordered) if ordered else None,
            "p95": ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None,
            "most": max(ordered, default=None),
        },
        "reported_stall_s": reported_s / len(done) if done else None,
    }


def line_text(number: int, noticed: Noticed) -> str:
    """One notice, as it is over."""
    return (
        f"notice {number}: {noticed.node} left after {noticed.left_after_s:.2f} s with exit code "
        f"{noticed.exit_code}; {noticed.env_steps_lost:.0f} env steps lost by the others"
    )


def text(document: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    stall = document["stall_s"]
    shown = {k: "-" if stall[k] is None else f"{stall[k]:.3f} s" for k in ("p50", "p95", "most")}
    left_s, lost = document["left_after_s"], document["env_steps_lost"]
    count, verdict = len(document["notices"]), "" if document["held"] else "NOT "
    lines = [
        f"{count} notices of {LEFT_S:g} s; the node left after at most {left_s:.2f} s",
        f"env steps lost by the others: {lost:.0f}",
        f"the others stood still: p50 {shown['p50']}, p95 {shown['p95']}, most {shown['most']}, "
        + f"{stall['count']} measured; by their own books {document['reported_stall_s']:.3f} s on average",
        f"{verdict}all left on time with code 75, and nobody else was disturbed",
    ]
    return "\n".join(lines)
