"""Each call to etcd is measured, under a name that the metrics know."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rallypoint.daemon.errors import StoreError, StoreUnavailableError
from rallypoint.daemon.etcd import connection, store
from rallypoint.daemon.etcd.connection import Access, Method
from rallypoint.daemon.etcd.store import EtcdStore
from rallypoint.daemon.executors.labels import ETCD_CALLS
from tests.fakes.etcd_server import cluster


def test_the_metrics_know_every_method_that_is_called() -> None:
    methods = [x for module in (connection, store) for x in vars(module).values()]
    labels = {method.label for method in methods if isinstance(method, Method)}
    assert labels == set(ETCD_CALLS)


@pytest.mark.slow
@pytest.mark.faults
def test_calls_are_measured_also_those_that_fail(tmp_path: Path) -> None:
    seen: list[tuple[str, float, StoreError | None]] = []

    async def scenario(access: Access, end: object) -> None:
        etcd = EtcdStore(access, detect_s=1.0, observe=lambda *one: seen.append(one))
        lease = await etcd.grant(5.0)
        await etcd.keepalive(lease)
        await etcd.compare_and_swap({"/a": b"1"}, {"/a": 0}, lease)
        watch = etcd.watch("/", 1)
        await anext(watch)
        assert callable(end)
        end(0)
        with pytest.raises(StoreUnavailableError):
            await etcd.get("/a")
        await etcd.close()

    with cluster(tmp_path) as servers:
        asyncio.run(asyncio.wait_for(scenario(servers.access, servers.kill), 60))
        assert servers.processes[0].poll() is not None
    assert [name for name, *_ in seen if name != "watch"] == [
        *("lease_grant", "lease_keep_alive", "txn", "range")
    ]
    assert "watch" in {name for name, *_ in seen}
    failed = {(name, type(error)) for name, _, error in seen if error is not None}
    assert failed - {("watch", StoreUnavailableError)} == {("range", StoreUnavailableError)}
    assert min(seconds for _, seconds, _ in seen) > 0


def test_endpoints_that_do_not_answer_are_said_once_not_in_every_round() -> None:
    nobody = Access(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))

    async def scenario() -> None:
        etcd = EtcdStore(nobody, detect_s=0.2)
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                await etcd.get("/a")
        await etcd.close()

    with capture_logs() as logs:
        asyncio.run(scenario())
    left = [line["log_level"] for line in logs if line["event"] == "etcd_endpoint_left"]
    assert left[:3] == ["info"] * 3
    assert set(left[3:]) == {"debug"}
