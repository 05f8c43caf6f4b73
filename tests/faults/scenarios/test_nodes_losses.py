"""Three nodes train one job on a real etcd, and lose parts of it. One job is shared by the cases."""

from collections.abc import Iterator

import pytest

from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.nodes import Nodes, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdCluster) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("nodes"), etcd) as job:
        job.start(*NAMES)
        yield job


@pytest.mark.parametrize("victim", NAMES)
def test_a_worker_of_any_node_is_killed_and_all_other_processes_stay(
    job: Nodes, victim: str
) -> None:
    before = job.settle(*NAMES)
    pids = job.pids(*NAMES)
    killed = job[victim].kill_worker()
    job[victim].wait_logged("worker_exited", pid=killed, reason="killed by SIGKILL")
    job[victim].wait_for(lambda s: s["generation"] > before[victim]["generation"], "a change")
    after = job.settle(*NAMES)
    others = {name: pid for name, pid in pids.items() if name != victim}
    assert job.pids(*others) == others
    assert job[victim].pid != killed
    assert len({s["generation"] for s in after.values()}) == 1
