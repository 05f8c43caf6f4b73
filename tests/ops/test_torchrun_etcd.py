"""Stock torchrun agents that meet on a real etcd, and the store that they share."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops import torchrun
from tests.fakes.etcd_server import EtcdCluster, cluster

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "fakes" / "torchrun_script.py"
WAIT_S = 90.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with cluster(tmp_path / "etcd") as servers:
        yield servers


KEYS = ["round-1/b", "round-1/c"]


def parameters(etcd: EtcdCluster, config: dict[str, str]) -> RendezvousParameters:
    return RendezvousParameters("etcd3", ",".join(etcd.endpoints), "run-1", 1, 3, None, **config)


@contextmanager
def keys_of(etcd: EtcdCluster, **config: str) -> Iterator[torchrun.LeasedKeys]:
    keys = torchrun.LeasedKeys(parameters(etcd, config))
    try:
        yield keys
    finally:
        keys.close()


def wait_until(what: Callable[[], bool], agents: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, log.read_text()[-4000:]
        assert all(agent.poll() is None for agent in agents), log.read_text()[-4000:]
        time.sleep(0.05)


class Seen(NamedTuple):
    """A worker that has reduced."""

    pid: int
    agent: int
    world: int
    rank: int


def workers(folder: Path) -> set[Seen]:
    lines = (path.read_text().splitlines()[:1] for path in folder.glob("worker-*"))
    return {Seen(*map(int, first.split())) for (first,) in filter(None, lines)}


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_three_agents_train_and_the_others_meet_again_when_one_is_killed(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    folder, log = tmp_path / "workers", tmp_path / "agents.log"
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3"),
        *("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "etcd3", "--rdzv-endpoint", etcd.endpoints[0], "--rdzv-id", "run-1"),
        *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"),
        *("--local-addr", "127.0.0.1", str(SCRIPT), str(folder)),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    agents = []
    try:
        with log.open("ab") as output:
            for _ in range(3):
                agents.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=output, process_group=0
                    )
                )
        # A slow third agent may come to a first round of two, which then starts anew.
        wait_until(lambda: [w.world for w in workers(folder)].count(3) == 3, agents, log)
        assert any(key.endswith("/state") for key in etcd.written("/torchrun/run-1/"))
        first = workers(folder)
        (lost,) = (w for w in first if (w.world, w.rank) == (3, 0))
        (agent,) = (agent for agent in agents if agent.pid == lost.agent)
        agent.kill()
        agent.wait()
        os.kill(lost.pid, signal.SIGKILL)
        rest = [other for other in agents if other is not agent]
        wait_until(lambda: [w.world for w in workers(folder) - first] == [2, 2], rest, log)
        (folder / "stop").touch()
        assert [agent.wait(WAIT_S) for agent in rest] == [0, 0], log.read_text()[-4000:]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its worker
            agent.wait(WAIT_S)


def test_state_is_swapped_by_its_token(etcd: EtcdCluster) -> None:
    with keys_of(etcd) as keys:
        backend = torchrun.StateBackend(keys)
        assert backend.get_state() is None
        first = backend.set_state(b"1")
        assert first is not None
        assert (first[0], first[2]) == (b"1", True)
        assert backend.get_state() == first[:2]
        assert backend.set_state(b"other") == (*first[:2], False)
        second = backend.set_state(b"2", first[1])
        assert second is not None
        assert (second[0], second[2]) == (b"2", True)
        assert backend.set_state(b"late", first[1]) == (*second[:2], False)


def test_the_store_does_what_torch_asks_of_one(etcd: EtcdCluster) -> None:
    with keys_of(etcd) as mine, keys_of(etcd) as others:
        inner = torchrun.AgentStore(mine), torchrun.AgentStore(others)
        store, other = (PrefixStore("round-1", one) for one in inner)
        store.set_timeout(timedelta(seconds=20))
        writer = threading.Thread(target=inner[1].multi_set, args=(KEYS, [b"2", b"3"]))
        store.set("a", "1")
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        writer.start()
        assert store.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
        writer.join()
        adders = [threading.Thread(target=lambda s=s: s.add("n", 2)) for s in (store, other)]
        for thread in adders:
            thread.start()
        for thread in adders:
            thread.join()
        assert store.add("n", 1) == 5
        assert store.compare_set("d", "", "x") == b"x"
        assert other.compare_set("d", "y", "z") == b"x"
        assert other.compare_set("d", "x", "z") == b"z"
        with pytest.raises(DistStoreError, match="not all written"):
            store.wait(["absent"], timedelta(milliseconds=200))


def test_keys_end_with_the_agents(etcd: EtcdCluster) -> None:
    with keys_of(etcd, ttl_s="2") as keys:
        torchrun.StateBackend(keys).set_state(b"1")
        assert etcd.written("/torchrun/") == ["/torchrun/run-1/state"]
    deadline_s = time.monotonic() + WAIT_S
    while etcd.written("/torchrun/"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("endpoint", "config", "words"),
    [
        ("host", {}, r"--rdzv-endpoint: 'host' must be host:port"),
        ("http://host:2379", {}, r"must be host:port .* without http://"),
        ("host:2379,host:99999", {}, "'host:99999' must be host:port"),
        ("host:2379", {"ttl_s": "abc"}, "--rdzv-conf ttl_s=abc: must be seconds"),
        ("host:2379", {"outage_s": "0"}, "--rdzv-conf outage_s=0: must be seconds"),
    ],
)
def test_what_cannot_be_an_etcd_is_refused_at_once(
    endpoint: str, config: dict[str, str], words: str
) -> None:
    told = RendezvousParameters("etcd3", endpoint, "run-1", 1, 3, None, **config)
    with pytest.raises(ConfigError, match=words):
        torchrun.LeasedKeys(told)


def test_an_etcd_that_is_away_is_a_connection_error(etcd: EtcdCluster) -> None:
    with keys_of(etcd, outage_s="1") as keys:
        etcd.kill(0)
        with pytest.raises(RendezvousConnectionError, match="no answer within 1 s"):
            torchrun.StateBackend(keys).get_state()
