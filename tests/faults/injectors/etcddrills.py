"""One drill in which etcd fails, not a node: what must be true of the job meanwhile and afterwards."""

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.daemon.executors import proctable
from tests.fakes.etcd_server import EtcdCluster
from tests.fakes.supervised import Status
from tests.faults.injectors.drills import DETECT_S, RECOVERY_S, Drill, process_state, until
from tests.faults.injectors.netns import NODES
from tests.faults.injectors.nodes import together

LEASE_S = 2 * DETECT_S
"""Long enough for any lease to run out, and for a node to be told that its call got no answer."""


class EtcdDrill(Drill):
    """The job trains on three servers of etcd."""

    @property
    def etcd(self) -> EtcdCluster:
        """The servers."""
        return self.job.etcd

    def leases(self, at: int | None = None) -> dict[str, str]:
        """The lease that each node's record is under, as etcdctl takes it; absent: no record. ``at``: the
        server that is asked, None: any."""
        prefix = f"/rallypoint/{self.job.job}/members/"
        found = json.loads(self.etcd.ctl("get", "--prefix", prefix, "-w", "json", at=at))
        return {
            base64.b64decode(item["key"]).decode().removeprefix(prefix): f"{item['lease']:x}"
            for item in found.get("kvs", [])
        }

    def trains_on(self, seconds: float = LEASE_S) -> None:
        """For this long all nodes train, in one generation, and each commits more iterations."""
        iterations = {name: self.job[name].status()["iteration"] for name in NODES}
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for name in NODES:
                self._trains(name, self.job[name].status())
            time.sleep(0.1)
        for name, seen in iterations.items():
            self._trains(name, self._past(name, seen + 3))

    def _past(self, name: str, iteration: int) -> Status:
        return self.job[name].wait_for(lambda s: s["iteration"] > iteration, "more iterations")

    def _trains(self, name: str, status: Status) -> None:
        assert (status["state"], status["reason"]) == ("running", None), f"{name}: {status}"
        assert status["generation"] == self.generation, f"{name}: {status}"

    def unnoticed(self) -> None:
        """All train in the generation of before."""
        after = self.job.settle(*NODES)
        assert {s["generation"] for s in after.values()} == {self.generation}
        assert together(after[NODES[0]], len(NODES))

    def holds(self, *names: str, why: str) -> None:
        """These nodes say that the job holds in the generation of before, and why."""
        for name in names:
            held = self.job[name].wait_for(lambda s: s["state"] == "holding", f"{name} to hold")
            assert why in held["reason"], held["reason"]
            assert held["generation"] == self.generation

    def healed(self, *newcomers: str) -> None:
        """All train again; the others lost nothing, and were broken up once."""
        back_s, before = time.monotonic(), self.generation
        self.whole(*newcomers)
        stayed = self.rest(*newcomers)
        steps_s = [self._first_step_s(name, before) - back_s for name in stayed]
        print(f"all {len(stayed)} survivors step {max(steps_s):.2f} s after the store is back")
        assert max(steps_s) < RECOVERY_S
        assert self.job.pids(*stayed) == {name: self.pids[name] for name in stayed}

    def _first_step_s(self, name: str, generation: int) -> float:
        """When this node's worker made its first optimiser step after the forced change that followed."""
        lines = self.job[name].journal()
        first = next(
            x
            for x in lines
            if x["event"] == "recovery" and x["generation"] > generation and x["kind"] == "forced"
        )
        return max(float(step["at_s"]) for step in first["stepped"])

    @contextmanager
    def frozen_servers(self, *numbers: int) -> Iterator[None]:
        """These servers of etcd are stopped in this block, and seen to be."""
        for number in numbers:
            self.etcd.freeze(number)
        try:
            until(lambda: all(map(self._stopped, numbers)), "servers to be stopped")
            yield
        finally:
            for number in numbers:
                self.etcd.thaw(number)

    def _stopped(self, number: int) -> bool:
        return process_state(self.etcd.processes[number].pid) == "T"

    @contextmanager
    def frozen_supervisor(self, name: str) -> Iterator[None]:
        """The supervisor of a node is stopped in this block; its worker is not."""
        pid = self.job[name].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: process_state(pid) == "T", f"{pid} to be stopped")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def restart_supervisor(self, name: str) -> None:
        """SIGKILL to a supervisor alone; the next one adopts its worker."""
        adopted = len(self.job[name].logged("worker_adopted"))
        self.job[name].kill_supervisor()
        assert proctable.read(self.pids[name]) is not None
        self.job.start(name)
        node = self.job[name]
        node.wait_until(
            lambda: len(node.logged("worker_adopted")) > adopted, lambda: "an adopted worker"
        )
        assert node.logged("worker_adopted")[-1]["pid"] == self.pids[name]
