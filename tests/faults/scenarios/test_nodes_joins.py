"""Nodes that come to a job: three at once, and one that dies as it enters."""

import os
import signal
from pathlib import Path

import pytest

from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.drills import SETTINGS, process_state, processes, until
from tests.faults.injectors.netns import drill
from tests.faults.injectors.nodes import Nodes, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NEWCOMERS = ("b", "c", "d")
DEBOUNCE = ("--set", "membership.join_debounce_s=4.0")


def ready_at_once(job: Nodes, *names: str) -> None:
    """Stop the worker of each node just before it says that it is ready, until all are there."""
    for node in job.start(*names):
        node.arming.arm("ready=stop")
    pids = [fired.pid for name in names for fired in job[name].wait_fired()]
    until(lambda: all(process_state(pid) == "T" for pid in pids), "they say so before they stop")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def whole(job: Nodes, name: str) -> bool:
    """Whether a node's journal has each iteration so far once, in order."""
    iterations = [iteration for iteration, _ in job.committed(name)]
    return iterations == list(range(1, len(iterations) + 1))


def test_a_burst_of_three_joins_is_one_change(tmp_path: Path) -> None:
    with drill(tmp_path, *SETTINGS, *DEBOUNCE, hosts=("a", *NEWCOMERS)) as job:
        job.start("a")
        before = job.settle("a")["a"]
        pids = job.pids("a")
        ready_at_once(job, *NEWCOMERS)
        after = job.settle("a", *NEWCOMERS)
        assert {s["generation"] for s in after.values()} == {before["generation"] + 1}
        assert (after["a"]["last_change"]["kind"], after["a"]["last_change"]["cause"]) == (
            "planned",
            "join",
        )
        assert job.by_rank("a")[0] == "a"
        assert job.pids("a") == pids
        hashes = [dict(job.committed(name)) for name in ("a", *NEWCOMERS)]
        common = set.intersection(*(set(one) for one in hashes))
        assert len(common) >= 3
        assert all(len({one[i] for one in hashes}) == 1 for i in common)
        assert whole(job, "a")
        assert job.end("a", *NEWCOMERS) == dict.fromkeys(("a", *NEWCOMERS), 0)
        assert job.left() == []
        assert processes(job, "a", *NEWCOMERS) == []


def test_a_node_whose_worker_dies_as_it_enters_costs_no_iteration_and_no_other_process(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd) as job:
        job.start("a")
        before = job.settle("a")["a"]
        pids = job.pids("a")
        (node,) = job.start("b")
        node.arming.arm("arrive=kill")
        (fired,) = node.wait_fired()
        node.wait_logged("worker_exited", pid=fired.pid, reason="killed by SIGKILL")
        after = job.settle("a", "b")["a"]
        assert after["generation"] > before["generation"] + 1
        assert job.pids("a") == pids
        assert whole(job, "a")
