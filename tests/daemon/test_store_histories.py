"""The same histories of operations on the embedded store and on a real etcd: the same answers."""

import asyncio
from collections.abc import Iterator

import pytest

from rallypoint.daemon.etcd.store import EtcdStore
from rallypoint.daemon.executors.embedded import EmbeddedStore
from rallypoint.daemon.executors.store import MembershipStore
from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.fakes.store_history import Operation, Player, random_history
from tests.fakes.stores import PrefixedStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with cluster(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


async def played(store: MembershipStore, history: list[Operation]) -> list[object]:
    try:
        async with asyncio.timeout(30.0):
            return await Player(store).play(history)
    finally:
        await store.close()


@pytest.mark.parametrize("seed", range(20))
def test_embedded_answers_like_etcd(etcd: EtcdCluster, seed: int) -> None:
    history = random_history(seed, 80)
    real = PrefixedStore(EtcdStore(etcd.access, detect_s=5.0), f"/history-{seed}/")
    expected = asyncio.run(played(real, history))
    assert asyncio.run(played(EmbeddedStore(), history)) == expected
