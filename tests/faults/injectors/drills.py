"""One drill: a fault of a network or of whole nodes, and everything that must be true afterwards."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from rallypoint.daemon.executors import proctable
from tests.faults.injectors.job import POLL_S, WAIT_S
from tests.faults.injectors.netns import NODES, NetNodes, drill
from tests.faults.injectors.signals import signal_all

DETECT_S = float(os.environ.get("DRILL_DETECT_S", "2"))
"""``detect_s`` of these jobs; etcd grants no less than 2 s. For figures it may be another."""
RENEWED_S = DETECT_S / 3
"""A lease has been renewed this recently."""
START_S = 300.0
"""Bound of the start of nodes: each imports what a worker needs, on a machine that does other things too."""
RECOVERY_S = 15.0
"""Bound from a fault to the next optimiser step, on a machine that does other things too: well below
`collective_s`, after which gloo would see a loss by itself. What it takes is printed."""

SETTINGS = (
    *("--set", f"membership.detect_s={DETECT_S}"),
    *(
        "--set",
        "membership.quarantine_after=50",
    ),  # drills of one job may hit a node again and again
)


class Drill:
    """What a job of three nodes was before a fault, and what it must be afterwards: `sound` holds at the
    end of the block. The clock is the monotonic one, which all processes of a machine share."""

    def __init__(self, job: NetNodes) -> None:
        assert not job.spoilt, "an earlier drill left this job unsound"
        self.job = job
        self.before = job.settle(*NODES)
        self.pids = job.pids(*NODES)
        self.generation = max(status["generation"] for status in self.before.values())
        self.struck_s = time.monotonic()
        self._killed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.job.spoilt = True
        if kind is None:
            self.sound()
            self.job.spoilt = False

    def rest(self, *victims: str) -> list[str]:
        """All other nodes."""
        return [name for name in NODES if name not in victims]

    def cut(self, *names: str) -> None:
        """Pull the cables of these nodes at once."""
        self.strikes()
        self.job.network.cut(*names)

    def strikes(self) -> None:
        """The fault comes now."""
        self.struck_s = time.monotonic()

    def crash(self, *names: str) -> None:
        """SIGKILL to everything on these nodes at once; all of it is gone afterwards."""
        pids = processes(self.job, *names)
        self.strikes()
        signal_all(pids, signal.SIGKILL)
        self._killed |= set(names)
        for name in names:
            self.job[name].process.wait(WAIT_S)
        until(lambda: not processes(self.job, *names), f"the end of all processes of {names}")

    def start(self, *names: str) -> None:
        """Start these nodes again, and wait until their workers are warm."""
        start(self.job, *names)

    def kill_worker(self, name: str) -> None:
        """SIGKILL to the worker of a node."""
        self.strikes()
        self._killed.add(name)
        killed = self.job[name].kill_worker()
        self.job[name].wait_logged("worker_exited", pid=killed, reason="killed by SIGKILL")

    def survived(self, *names: str, cause: str, plans: int = 1) -> dict[str, Any]:
        """These nodes, and only these, train on in the same processes, after as many forced plans; the
        journal's line about the last one, with the seconds from the fault to its notice and to the next
        step as ``silence_s`` and ``recovery_s``."""
        after = self.job.settle(*names)
        assert {name: self.pids[name] for name in names} == self.job.pids(*names)
        assert {s["generation"] for s in after.values()} == {self.generation + plans}
        self.generation += plans
        lines = [self._recovery(name) for name in names]
        assert {(x["kind"], x["cause"]) for x in lines} == {("forced", cause)}
        stepped = [step["at_s"] for x in lines for step in x["stepped"]]
        noticed_s = min(x["noticed_s"] for x in lines)
        last = {**lines[0], "silence_s": noticed_s - self.struck_s}
        last["recovery_s"] = max(stepped) - self.struck_s
        print(f"{cause}: noticed after {last['silence_s']:.2f} s, ", end="")
        print(f"all {len(names)} survivors step after {last['recovery_s']:.2f} s")
        assert last["recovery_s"] < RECOVERY_S
        return last

    def _recovery(self, name: str) -> dict[str, Any]:
        """What the journal of a node says of the present generation."""
        node = self.job[name]

        def look() -> dict[str, Any] | None:
            lines = [x for x in node.journal() if x["event"] == "recovery"]
            return next((x for x in lines if x["generation"] == self.generation), None)

        return node.wait_until(look, lambda: f"generation {self.generation} in the journal")

    def whole(self, *newcomers: str) -> None:
        """All train again; those that were away came last, and nobody's process changed that should
        not have."""
        after = self.job.settle(*NODES)
        self.generation = after[NODES[0]]["generation"]
        if newcomers:
            ranks = self.job.by_rank(NODES[0])
            assert set(ranks[-len(newcomers) :]) == set(newcomers), ranks

    def sound(self) -> None:
        """Whose process was not killed has it still. Each iteration of the job was committed once, with
        one state, on whatever nodes: none is missing, repeated, or of another branch."""
        stayed = [name for name in NODES if name not in self._killed]
        assert self.job.pids(*stayed) == {name: self.pids[name] for name in stayed}
        lineage(self.job)


def lineage(job: NetNodes) -> None:
    """Every iteration is in the journals, in order and once on each node, with one hash on all."""
    hashes: dict[int, str] = {}
    for name in NODES:
        committed = job.committed(name)
        assert all(a < b for (a, _), (b, _) in pairwise(committed)), f"{name}: {committed}"
        for iteration, state_hash in committed:
            known = hashes.setdefault(iteration, state_hash)
            assert known == state_hash, f"{name}, iteration {iteration}: {state_hash}, not {known}"
    assert sorted(hashes) == list(range(1, len(hashes) + 1))


# --- faults of whole nodes -------------------------------------------------------------------------


def processes(job: NetNodes, *names: str) -> list[int]:
    """Everything that these nodes run: supervisor, fork server, workers."""
    return [pid for name in names for pid in job.network.processes(name)]


@contextmanager
def frozen(job: NetNodes, name: str) -> Iterator[list[int]]:
    """Everything on this node is stopped in this block, and seen to be."""
    pids = processes(job, name)
    signal_all(pids, signal.SIGSTOP)
    try:
        until(lambda: all(process_state(pid) == "T" for pid in pids), f"{pids} to be stopped")
        yield pids
    finally:
        signal_all(pids, signal.SIGCONT)


def start(job: NetNodes, *names: str) -> None:
    """Start these nodes, and wait until the workers of all are warm."""
    before = {name: _ready(job, name) if name in job.running else 0 for name in names}
    job.start(*names)
    until(
        lambda: all(_ready(job, name) > count for name, count in before.items()),
        f"warm workers of {names}",
        START_S,
    )


def _ready(job: NetNodes, name: str) -> int:
    return len(job[name].logged("worker_ready"))


def process_state(pid: int) -> str:
    """The kernel's letter for a process: T when it is stopped; "" when it is gone."""
    entry = proctable.read(pid)
    return "" if entry is None else entry.state


def until(what: Callable[[], bool], why: str, bound_s: float = WAIT_S) -> None:
    """Wait for something that is no line of a status or a log, within a bound."""
    deadline_s = time.monotonic() + bound_s
    while not what():
        assert time.monotonic() < deadline_s, why
        time.sleep(POLL_S)


# --- a job for several drills ----------------------------------------------------------------------


@contextmanager
def drilled(
    base: Path, *options: str, names: Sequence[str] = NODES, etcd_options: Sequence[str] = ()
) -> Iterator[NetNodes]:
    """A job of three nodes for the drills of a module. It stops by agreement, and leaves nothing."""
    with drill(base, *SETTINGS, *options, etcd_options=etcd_options) as job:
        start(job, *names)
        yield job
        if job.spoilt:
            return
        job.settle(*names)
        assert job.end(*names) == dict.fromkeys(names, 0)
        assert job.left() == []
        assert processes(job, *names) == []
        lineage(job)
