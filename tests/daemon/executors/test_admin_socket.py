"""The admin socket and its client."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.commands import client
from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from rallypoint.daemon.executors.admin import MAX_LINE_BYTES, AdminServer
from rallypoint.daemon.shared import unixsocket
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.rundir import RunDir


class Supervisor:
    def __init__(self) -> None:
        self.asked: list[object] = []

    async def status(self) -> dict[str, Any]:
        return {"job": "default"}

    def request_stop(self, reason: str) -> None:
        self.asked.append(reason)

    def request_drain(self, deadline_s: float | None) -> None:
        self.asked.append(deadline_s)

    def request_notice(self, source: str, left_s: float, text: str) -> None:
        self.asked.append((source, left_s, text))

    def request_pause(self, *, paused: bool) -> str:
        self.asked.append(paused)
        return "" if paused else "the job is not paused"

    def request_scale(self, workers: int) -> str:
        return "" if workers == 2 else f"{workers} workers are too many"

    def detach(self) -> None:
        self.asked.append("detach")

    async def quarantined(self) -> list[dict[str, Any]]:
        return [{"slot": 1}]

    async def clear_quarantine(self, node: str | None, slot: int | None) -> list[int]:
        return [1] if node is None and slot in (None, 1) else []


def test_commands_are_answered_and_the_end_is_told(tmp_path: Path) -> None:
    def use() -> list[object]:
        with AdminClient(tmp_path) as client, AdminClient(tmp_path) as other:
            status = client.ask(command="status")
            refused: list[str] = []
            for request in ({"command": "explode"}, {"command": "stop", "now": True}, {}):
                with pytest.raises(ProtocolError, match="not a request") as caught:
                    client.ask(**request)
                refused.append(str(caught.value))
            accepted = client.ask(command="drain", deadline_s=3.5)
            other.ask(command="status")
            with pytest.raises(ProtocolError, match="needs deadline_s"):
                other.ask(command="notice")
            other.ask(command="notice", deadline_s=30)
            assert other.ask(command="pause") == {"accepted": True}
            assert other.ask(command="scale", workers=2) == {"accepted": True}
            for request, why in (
                ({"command": "resume"}, "not paused"),
                ({"command": "scale"}, "0 w"),
            ):
                with pytest.raises(ProtocolError, match=f"refused: .*{why}"):
                    other.ask(**request)
            assert other.ask(command="quarantine") == {"quarantined": [{"slot": 1}]}
            assert other.ask(command="quarantine_clear", slot=0) == {"cleared": []}
            assert other.ask(command="quarantine_clear") == {"cleared": [1]}
            assert other.ask(command="quarantine_clear", node="b") == {"cleared": []}
            client.ask(command="detach")
            return [status, len(refused), accepted]

    async def run() -> None:
        supervisor = Supervisor()
        server = AdminServer(RunDir(tmp_path).admin_socket, supervisor)
        await server.start()
        assert await asyncio.to_thread(use) == [
            {"status": {"job": "default"}},
            3,
            {"accepted": True},
        ]
        assert supervisor.asked == [
            3.5,
            ("drill", 30.0, "simulated, 30 s left"),
            True,
            False,
            "detach",
        ]
        await server.close(0, "done")

    asyncio.run(run())


def test_who_asked_for_the_end_is_told_how_it_was(tmp_path: Path) -> None:
    async def run() -> dict[str, Any] | None:
        supervisor = Supervisor()
        server = AdminServer(RunDir(tmp_path).admin_socket, supervisor)
        await server.start()
        with await asyncio.to_thread(AdminClient, tmp_path) as client:
            await asyncio.to_thread(client.ask, command="stop")
            await server.close(0, "stopped by agreement")
            return await asyncio.to_thread(client.wait_for_end, 10.0)

    assert asyncio.run(run()) == {"exited": 0, "reason": "stopped by agreement"}


def test_an_endless_line_is_dropped(tmp_path: Path) -> None:
    async def run() -> bytes:
        server = AdminServer(RunDir(tmp_path).admin_socket, Supervisor())
        await server.start()
        path = str(RunDir(tmp_path).admin_socket)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * (MAX_LINE_BYTES * 2))
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
            await server.close(0, "done")

    assert asyncio.run(run()) == b""


def test_nobody_there_is_said_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoSupervisorError, match=r"no supervisor answers in .*rallypoint run"):
        AdminClient(tmp_path)


def test_a_supervisor_that_hangs_is_said_with_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the connection, and nobody reads."""
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.1)
    with (
        unixsocket.listen(RunDir(tmp_path).admin_socket),
        AdminClient(tmp_path) as asking,
        pytest.raises(NoSupervisorError, match=r"did not answer within 0\.1 s; look at its log"),
    ):
        asking.ask(command="status")
