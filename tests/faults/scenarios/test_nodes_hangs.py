"""Workers that hang on nodes with one worker each: no node sees the page of the others' (DESIGN 4.9)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.executors import proctable
from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.nodes import Node, Nodes, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

HANG_S = 3.0
NAMES = ("a", "b", "c")
CHANGES = 'membership_changes_total{cause="hang"}'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdCluster) -> Iterator[Nodes]:
    with nodes(
        tmp_path_factory.mktemp("nodes"), etcd, "--set", f"membership.hang_s={HANG_S}"
    ) as job:
        job.start(*NAMES)
        yield job


def assert_ended_as_hung(job: Nodes, victim: str, pid: int, pids: dict[str, int]) -> str:
    """Exactly this worker was ended, for a hang, by its own node; all train on, the others in their
    processes. The reason."""
    exited = job[victim].wait_logged("worker_exited", pid=pid)
    job.settle(*NAMES)
    others = {name: pid for name, pid in pids.items() if name != victim}
    assert job.pids(*others) == others
    killed = job[victim].wait_logged("worker_killed", worker=exited["worker"])
    assert killed["reason"].startswith("hang: silent for ")
    assert [
        n for n in NAMES for x in job[n].logged("worker_killed") if x["worker"] == killed["worker"]
    ] == [victim]
    evidence = Path(job[victim].wait_logged("evidence_saved", worker=killed["worker"])["path"])
    text = (evidence / "worker-0.txt").read_text()
    assert "State:\tT (stopped)" in text
    counted = 'worker_restarts_total{reason="hang"}'
    assert {n for n in NAMES if job[n].metrics()[counted]} >= {victim}
    return str(killed["reason"])


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_09_the_only_worker_of_a_node_is_stopped_outside_of_collectives(
    job: Nodes, rank: int
) -> None:
    job.settle(*NAMES)
    pids, victim = job.pids(*NAMES), job.by_rank("a")[rank]
    counted = {name: job[name].metrics()[CHANGES] for name in NAMES}
    job[victim].arming.arm("rollout=stop")
    (fired,) = job[victim].wait_fired()
    assert fired.pid == pids[victim]
    reason = assert_ended_as_hung(job, victim, fired.pid, pids)
    others = [name for name in NAMES if name != victim]
    assert all(f"{name}/0#" in reason.partition(";")[2] for name in others), "who waited is named"
    assert {n: job[n].metrics()[CHANGES] for n in others} == {n: counted[n] + 1 for n in others}
    for name in NAMES:
        assert not job[name].logged("generation_stuck"), "nobody waits in what cannot end"


def test_rule_09_one_stopped_inside_the_collective_of_the_others_costs_a_rebuild_first(
    job: Nodes,
) -> None:
    job.settle(*NAMES)
    pids, victim = job.pids(*NAMES), job.by_rank("a")[1]
    node = job[victim]
    node.wait_until(lambda: _stop_inside(node, pids[victim]), lambda: "it to be caught inside")
    reason = assert_ended_as_hung(job, victim, pids[victim], pids)
    assert "(inside collective" in reason
    stuck = [line for name in NAMES for line in job[name].logged("generation_stuck")]
    assert stuck, "all were inside: nobody was ended for that"
    assert "all wait for " in stuck[0]["reason"]


def _stop_inside(node: Node, pid: int) -> bool:
    """SIGSTOP to a worker that waits in a collective; False, and it goes on, when it did not."""
    if not node.page(0).inside:
        return False
    os.kill(pid, signal.SIGSTOP)
    node.wait_until(lambda: _stopped(pid), lambda: "the worker to stop")
    if node.page(0).inside:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _stopped(pid: int) -> bool:
    entry = proctable.read(pid)
    return entry is not None and entry.state == "T"
