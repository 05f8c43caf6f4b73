"""Three nodes on three hosts, etcd on three more, and cables that are pulled."""

from collections.abc import Iterator

import pytest

from tests.faults.injectors.netns import NODES, NetNodes, drill

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetNodes]:
    with drill(tmp_path_factory.mktemp("cuts")) as job:
        job.start(*NODES)
        yield job


def test_the_cable_of_a_node_is_pulled_and_put_back(job: NetNodes) -> None:
    before = job.settle(*NODES)
    victim = job.follower()
    rest = [name for name in NODES if name != victim]
    pids = job.pids(*NODES)
    job.network.cut(victim)
    after = job.settle(*rest)
    assert after[rest[0]]["last_change"]["cause"] == "node_lost"
    assert after[rest[0]]["iteration"] > before[victim]["iteration"]
    job[victim].wait_logged("store_unavailable")
    assert job[victim].mine["pid"] == pids[victim]
    job.network.heal(victim)
    job.settle(*NODES)
    assert job[victim].logged("lease_lost")
    assert job.pids(*NODES) == pids
