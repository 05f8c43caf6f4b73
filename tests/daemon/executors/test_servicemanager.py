"""What systemd is told, over a socket as systemd opens it."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.executors.processes import worker_environment
from rallypoint.daemon.executors.servicemanager import ServiceManager


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(60)
        yield end


def words(listener: socket.socket) -> list[str]:
    return listener.recv(4096).decode().split("\n")


def keep(manager: ServiceManager, listener: socket.socket, *, stopping: bool) -> list[list[str]]:
    """The first three datagrams."""

    async def run() -> list[list[str]]:
        task = asyncio.create_task(manager.keep(lambda: "running", lambda: stopping))
        try:
            return [await asyncio.to_thread(words, listener) for _ in range(3)]
        finally:
            task.cancel()

    return asyncio.run(run())


def test_ready_once_then_alive_and_the_state_when_it_changes(listener: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "60000", "HOME": "/"}
    assert worker_environment(environ, "lo").keys().isdisjoint({*environ} - {"HOME"})
    manager = ServiceManager(environ)
    assert manager.watchdog_s == 0.06
    assert keep(manager, listener, stopping=False) == [
        ["READY=1"],
        ["WATCHDOG=1", "STATUS=running"],
        ["WATCHDOG=1"],
    ]


def test_a_stop_asks_for_time(listener: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "60000"}
    said = keep(ServiceManager(environ), listener, stopping=True)
    assert said[2] == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=10000000"]


def test_the_watchdog_of_another_process_is_not_fed(listener: socket.socket) -> None:
    watched = {"WATCHDOG_USEC": "60000", "WATCHDOG_PID": "1"}
    assert ServiceManager({"NOTIFY_SOCKET": listener.getsockname(), **watched}).watchdog_s is None


def test_an_abstract_address_and_the_end() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0rallypoint-notify-test")
        end.settimeout(60)
        ServiceManager({"NOTIFY_SOCKET": "@rallypoint-notify-test"}).ending("drained\nmore")
        assert words(end) == ["STOPPING=1", "STATUS=drained", "EXTEND_TIMEOUT_USEC=90000000"]


def test_without_systemd_nothing_is_said() -> None:
    async def run() -> None:
        await ServiceManager({}).keep(lambda: pytest.fail("asked"), lambda: False)

    asyncio.run(run())


def test_a_socket_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ending("drained")
