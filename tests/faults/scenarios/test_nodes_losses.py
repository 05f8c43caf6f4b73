"""Three nodes train one job on a real etcd, and lose parts of it. One job is shared by the cases."""

from collections.abc import Iterator

import pytest

from tests.fakes.etcd_server import EtcdCluster
from tests.fakes.supervised import Status
from tests.faults.injectors.nodes import Nodes, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdCluster) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("nodes"), etcd) as job:
        job.start(*NAMES)
        yield job


def agree(after: dict[str, Status]) -> None:
    """Every node shows the same job: its generation, and all workers of all nodes by rank."""
    shown = {
        (s["generation"], tuple((w["node"], w["rank"], w["incarnation"]) for w in s["workers"]))
        for s in after.values()
    }
    assert len(shown) == 1, shown


@pytest.mark.parametrize("victim", NAMES)
def test_a_worker_of_any_node_is_killed_and_all_other_processes_stay(
    job: Nodes, victim: str
) -> None:
    before = job.settle(*NAMES)
    pids = job.pids(*NAMES)
    killed = job[victim].kill_worker()
    job[victim].wait_logged("worker_exited", pid=killed, reason="killed by SIGKILL")
    job[victim].wait_for(lambda s: s["generation"] > before[victim]["generation"], "a change")
    agree(job.settle(*NAMES))
    others = {name: pid for name, pid in pids.items() if name != victim}
    assert job.pids(*others) == others
    assert job[victim].pid != killed


@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_a_node_is_lost_and_comes_back_as_a_newcomer(job: Nodes, leads: bool) -> None:
    before = job.settle(*NAMES)
    victim = job.leader() if leads else job.follower()
    rest = [name for name in NAMES if name != victim]
    pids, lost = job.pids(*rest), job[victim].mine["incarnation"]
    job[victim].lose()
    after = job.settle(*rest)
    assert job.pids(*rest) == pids
    assert after[rest[0]]["iteration"] > before[victim]["iteration"]
    # Seen by closed ports, those of the worker and of a leader's supervisor, not by the end of a lease.
    assert after[rest[0]]["last_change"]["cause"] == "worker_lost"
    assert leads == any(job[name].logged("leader_gone") for name in rest)
    job.start(victim)
    agree(job.settle(*NAMES))
    assert job.pids(*rest) == pids
    back = job[victim].mine
    assert (back["rank"], back["incarnation"]) == (2, lost + 1)
    assert not job[victim].logged("worker_adopted")
    assert not job[victim].logged("iteration_gap")


@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_a_supervisor_alone_is_killed_and_its_worker_adopted_after_the_lease(
    job: Nodes, leads: bool
) -> None:
    before = job.settle(*NAMES)
    pids = job.pids(*NAMES)
    victim = job.leader() if leads else job.follower()
    witness = next(name for name in NAMES if name != victim)
    job[victim].kill_supervisor()
    job.wait_until_expired(victim)
    trained = job[witness].status()
    job[witness].wait_for(lambda s: s["iteration"] > trained["iteration"] + 3, "training goes on")
    job.start(victim)
    job[victim].wait_logged("worker_adopted", pid=pids[victim])
    after = job.settle(*NAMES)
    agree(after)
    assert job.pids(*NAMES) == pids
    assert {s["generation"] for s in after.values()} == {before[victim]["generation"]}


def test_sigterm_drains_one_node_and_the_job_goes_on(job: Nodes) -> None:
    job.settle(*NAMES)
    pids = job.pids("a", "b")
    assert job.end("c") == {"c": 0}
    assert job["c"].processes_left() == []
    assert [line["reason"] for line in job["c"].logged("worker_leaving")][-1] == "drained"
    after = job.settle("a", "b")
    assert job.pids("a", "b") == pids
    assert after["a"]["last_change"]["cause"] == "drain"
    job.start("c")
    agree(job.settle(*NAMES))
    assert job.pids("a", "b") == pids


def test_sigterm_of_all_nodes_at_once_stops_the_job(job: Nodes) -> None:
    job.settle(*NAMES)
    assert job.end(*NAMES) == dict.fromkeys(NAMES, 0)
    assert job.left() == []
    last = job.newest_checkpoint()
    assert {job.last_iteration(name) for name in NAMES} == {last}
    # Over all that this module did to the job: each iteration once, and the same state on every node.
    by_node = {name: job.committed(name) for name in NAMES}
    for committed in by_node.values():
        iterations = [iteration for iteration, _ in committed]
        assert iterations == sorted(set(iterations))
    everywhere = {fact for committed in by_node.values() for fact in committed}
    assert sorted(iteration for iteration, _ in everywhere) == list(range(1, last + 1))
