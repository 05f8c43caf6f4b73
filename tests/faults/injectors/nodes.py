"""Several nodes of one job on this machine: real supervisors, real workers, membership on a real etcd."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.etcd_server import EtcdCluster
from tests.fakes.supervised import Status
from tests.faults.injectors.job import PACED_RUN, WAIT_S, FaultJob

CLI = ("-m", "rallypoint.daemon.cli")
ASK_S = 0.25
"""Between two questions to etcdctl, which is a process each time."""
OPTIONS = ("--workers", "1", "--set", "membership.orphan_grace_s=30.0")


class Node(FaultJob):
    """One life of a node. Its workers are asked for by ``pid`` and end with it in `lose`."""

    name: str

    @property
    def mine(self) -> dict[str, Any]:
        """The line of this node's only worker."""
        worker: dict[str, Any]
        (worker,) = (w for w in self.status()["workers"] if w["node"] == self.name)
        return worker

    @property
    def pid(self) -> int:
        """The process of this node's only worker."""
        pid: int = self.mine["pid"]
        return pid

    def kill_worker(self) -> int:
        """SIGKILL to the worker; its pid."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def lose(self) -> None:
        """The whole node is gone: SIGKILL to the supervisor, then to all that it started."""
        self.kill_supervisor()
        self.end_all()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of this name; what the command itself says at its end is no JSON."""
        lines = (x for x in self.log_path.read_text().splitlines() if x.startswith("{"))
        return [line for x in lines if (line := json.loads(x))["event"] == event]

    def output(self) -> str:
        """All that it wrote to standard error."""
        return self.log_path.read_text()

    def command(self, *arguments: str) -> str:
        """Output of a subcommand about this node."""
        command = [sys.executable, *CLI, *arguments, "--dir", str(self.rundir.path)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout

    def checkpoints(self) -> list[int]:
        """Iterations of the committed checkpoints in its own directory."""
        found = (self.rundir.path / "checkpoints").glob("*/manifest.json")
        return sorted(json.loads(path.read_text())["iteration"] for path in found)


class Nodes:
    """The nodes of one job, by name. Each has a directory of its own."""

    def __init__(self, base: Path, etcd: EtcdCluster, *options: str) -> None:
        self.base = base
        self.job = f"job-{uuid.uuid4().hex[:8]}"
        self.etcd = etcd
        self._options = (*etcd.settings, "--job", self.job, *OPTIONS, *options)
        self.running: dict[str, Node] = {}

    def start(self, *names: str, options: tuple[str, ...] = ()) -> list[Node]:
        """Start these nodes, or start them again."""
        return [self._start(name, options) for name in names]

    def _start(self, name: str, options: tuple[str, ...]) -> Node:
        directory = self.base / name / "run"
        named = ("--set", f"node.name={name}")
        placed, launcher = self.place(name)
        words = (*self._options, *named, *placed, *options)
        node = Node(directory, *words, command=PACED_RUN, launcher=launcher)
        node.name = name
        self.running[name] = node
        return node

    def place(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Options of ``rallypoint run`` that say where a node is, and what puts its process there."""
        return (), ()

    def __getitem__(self, name: str) -> Node:
        return self.running[name]

    def settle(self, *names: str, iterations: int = 3) -> dict[str, Status]:
        """Wait until exactly these nodes train together, and each has committed some iterations more;
        the status of each."""
        count = len(names)
        for name in names:
            self._settle(name, count, iterations)
        return {name: self[name].status() for name in names}

    def _settle(self, name: str, count: int, iterations: int) -> None:
        node = self[name]
        reached = node.wait_for(lambda s: together(s, count), f"{count} nodes to train")
        bound = reached["iteration"] + iterations
        node.wait_for(
            lambda s: together(s, count) and _committed(s, name) >= bound,
            f"{name} to commit {iterations} iterations more",
        )

    def pids(self, *names: str) -> dict[str, int]:
        """The processes of these nodes' workers."""
        return {name: self[name].pid for name in names}

    def end(self, *names: str) -> dict[str, int]:
        """SIGTERM to these nodes at once; their exit codes."""
        for name in names:
            self[name].process.send_signal(signal.SIGTERM)
        return {name: self[name].process.wait(WAIT_S) for name in names}

    def exit_codes(self, *names: str) -> dict[str, int]:
        """Wait until these nodes have ended by themselves."""
        return {name: self[name].process.wait(WAIT_S) for name in names}

    # --- what the store, the journals and the checkpoints say ----------------------------------------

    def leader(self) -> str:
        """The node that leads."""
        return self._value("leader")

    def follower(self) -> str:
        """A node that runs and does not lead, and whose worker is not rank 0."""
        leader = self.leader()
        status = self.running[leader].status()
        ranks = {w["node"]: w["rank"] for w in status["workers"]}
        found: str = max((n for n in ranks if n != leader), key=lambda n: ranks[n])
        return found

    def by_rank(self, name: str) -> list[str]:
        """The nodes that train, by the rank of their worker, as this one shows it."""
        workers = [w for w in self[name].status()["workers"] if w["rank"] is not None]
        return [w["node"] for w in sorted(workers, key=lambda w: w["rank"])]

    def record(self) -> dict[str, Any]:
        """The job's record."""
        record: dict[str, Any] = json.loads(self._value("job"))
        return record

    def wait_until_expired(self, *names: str) -> None:
        """Until the leases of these nodes are over, and their keys gone."""
        keys = {f"/rallypoint/{self.job}/members/{name}" for name in names}
        deadline_s = time.monotonic() + WAIT_S
        while keys & set(self.etcd.written(f"/rallypoint/{self.job}/")):
            assert time.monotonic() < deadline_s, f"{keys} are still there"
            time.sleep(ASK_S)

    def committed(self, name: str) -> list[tuple[int, str]]:
        """Iterations in the journal of a node, as they came, with the hash of the state."""
        lines = [x for x in self[name].journal() if x["event"] == "iteration"]
        return [(x["iteration"], x["state_hash"]) for x in lines]

    def last_iteration(self, name: str) -> int:
        """The newest iteration in the journal of a node."""
        return self.committed(name)[-1][0]

    def newest_checkpoint(self) -> int:
        """The iteration of the newest committed checkpoint on any node."""
        return max(i for node in self.running.values() for i in node.checkpoints())

    def _value(self, key: str) -> str:
        path = f"/rallypoint/{self.job}/{key}"
        return self.etcd.ctl("get", "--print-value-only", path).strip()

    def left(self) -> list[int]:
        """Processes of any node that are still there."""
        return [pid for node in self.running.values() for pid in node.processes_left()]

    def close(self) -> None:
        for node in self.running.values():
            node.end_all()


@contextmanager
def nodes(base: Path, etcd: EtcdCluster, *options: str) -> Iterator[Nodes]:
    """A job without nodes yet; nothing of it is left at the end of the block."""
    job = Nodes(base, etcd, *options)
    try:
        yield job
    finally:
        job.close()


def together(status: Status, count: int) -> bool:
    """This many workers, of any nodes, train in one generation, and nobody else is about to."""
    states = [w["state"] for w in status["workers"] if w["rank"] is not None]
    return (
        status["state"] == "running"
        and status["world_size"] == count
        and states == ["training"] * count
    )


def _committed(status: Status, node: str) -> int:
    return max(w["committed_iteration"] or 0 for w in status["workers"] if w["node"] == node)
