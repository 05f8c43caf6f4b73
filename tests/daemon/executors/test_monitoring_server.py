"""HTTP: metrics, health, readiness; nobody can block it."""

import asyncio
import socket
import urllib.error
import urllib.request

import pytest

from rallypoint.daemon.executors.httpd import MonitoringServer
from rallypoint.daemon.executors.metrics import TABLE, Metrics
from rallypoint.daemon.shared.errors import ConfigError


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own server
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_everything_is_served_beside_idle_clients() -> None:
    metrics = Metrics()
    metrics.set("generation", 7)

    async def run() -> list[tuple[int, str]]:
        reasons = ["the job is starting", ""]
        server = MonitoringServer("127.0.0.1", 0, metrics.registry, lambda: reasons.pop(0))
        server.start()
        base = server.url.removesuffix("/metrics")
        port = int(base.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        paths = ("/metrics", "/healthz", "/readyz", "/readyz", "/else")
        try:
            return [await asyncio.to_thread(fetch, base + path) for path in paths]
        finally:
            for client in idle:
                client.close()
            server.close()

    exposition, health, not_ready, ready, other = asyncio.run(run())
    assert exposition[0] == 200
    assert "rallypoint_generation 7.0" in exposition[1]
    assert health == (200, "ok\n")
    assert not_ready == (503, "the job is starting\n")
    assert ready == (200, "ok\n")
    assert other[0] == 404


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            MonitoringServer("127.0.0.1", port, Metrics().registry, str)
    assert f"127.0.0.1:{port}: the port is in use" in str(caught.value)
    assert "--metrics-port" in str(caught.value)


def test_every_metric_is_named_as_monitoring_expects() -> None:
    for spec in TABLE:
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec.name
        assert spec.help.endswith("."), spec.name
        assert not spec.name.startswith("rallypoint_")
