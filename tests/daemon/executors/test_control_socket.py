"""The control socket against workers that misbehave."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from rallypoint.daemon.executors.control import MAX_UNREAD_BYTES, ControlServer
from rallypoint.daemon.shared import messages, unixsocket
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.plan import WorkerKey

KEY = WorkerKey("local", 0, 1)
OTHER = WorkerKey("local", 1, 1)


class Supervisor:
    """Accepts everybody but slot 9; keeps what was said."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[messages.WorkerMessage] = asyncio.Queue()
        self.accused: list[tuple[WorkerKey, str]] = []

    def hello(self, message: messages.Hello) -> messages.Welcome | messages.Leave:
        if message.key.slot == 9:
            return messages.Leave(reason="unknown")
        return messages.Welcome(supervisor_incarnation=1, formed=0, plan=None)

    def take(self, message: messages.WorkerMessage) -> None:
        if isinstance(message, messages.Progress) and message.stage == "nonsense":
            raise ProtocolError("no such stage")
        self.taken.put_nowait(message)

    def misbehaved(self, key: WorkerKey, reason: str) -> None:
        self.accused.append((key, reason))


class Client:
    """A worker's end, driven by the test."""

    def __init__(self, path: Path) -> None:
        self.socket = unixsocket.connect(path)
        self.socket.setblocking(False)
        self.reader = messages.FrameReader()

    async def send(self, *sent: messages.WorkerMessage | bytes) -> None:
        for message in sent:
            data = message if isinstance(message, bytes) else messages.encode(message)
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def receive(self) -> messages.SupervisorMessage | None:
        """The next message; None when the connection has ended."""
        while True:
            try:
                data = await asyncio.wait_for(
                    asyncio.get_running_loop().sock_recv(self.socket, 65536), 10
                )
            except ConnectionError:
                return None
            if not data:
                return None
            for body in self.reader.feed(data):
                return messages.decode_from_supervisor(body)


def hello(key: WorkerKey = KEY, protocol: int = messages.PROTOCOL_VERSION) -> messages.Hello:
    return messages.Hello(
        protocol=protocol, key=key, pid=1, start_ticks=1, versions={}, config_hash=""
    )


def progress(stage: str, key: WorkerKey = KEY) -> messages.Progress:
    return messages.Progress(key=key, stage=stage)


@pytest.fixture(name="log")
def captured_log() -> Iterator[LogCapture]:
    log = LogCapture()
    structlog.configure(processors=[log])
    yield log
    structlog.reset_defaults()


def serve(
    tmp_path: Path, use: Callable[[ControlServer, Supervisor, Client], Awaitable[None]]
) -> None:
    async def run() -> None:
        supervisor = Supervisor()
        server = ControlServer(tmp_path / "control.sock", supervisor)
        await server.start()
        client = Client(tmp_path / "control.sock")
        try:
            await use(server, supervisor, client)
        finally:
            client.socket.close()
            await server.close()
            await asyncio.sleep(0)

    asyncio.run(run())
    assert not (tmp_path / "control.sock").exists()


def test_an_accepted_worker_is_heard_and_told(tmp_path: Path) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        assert not server.send(KEY, messages.FormedMark(generation=1))
        await client.send(hello(), progress("warming up"))
        assert isinstance(await client.receive(), messages.Welcome)
        assert await supervisor.taken.get() == progress("warming up")
        assert server.send(KEY, messages.FormedMark(generation=2))
        assert await client.receive() == messages.FormedMark(generation=2)

    serve(tmp_path, use)


def test_a_refused_worker_is_told_why_and_not_heard(tmp_path: Path, log: LogCapture) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        key = WorkerKey("local", 9, 1)
        await client.send(hello(key))
        assert await client.receive() == messages.Leave(reason="unknown")
        await client.send(progress("still here", key))
        assert await client.receive() is None
        assert supervisor.taken.empty()

    serve(tmp_path, use)
    assert "came before Hello" in log.entries[0]["reason"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], "over the"),
        ([b"\x00\x00\x00\x02{}"], "not a worker's message"),
        ([b"\x00\x00\x00\x04\xff\xff\xff\xff"], "not a worker's message"),
        ([progress("too early")], "came before Hello"),
        ([hello(protocol=99)], "speaks protocol 99"),
        ([hello(), progress("not mine", OTHER)], "came on the connection of local/0#1"),
        ([hello(), progress("nonsense")], "no such stage"),
    ],
)
def test_a_client_that_makes_no_sense_is_dropped_with_the_reason(
    tmp_path: Path, log: LogCapture, sent: list[messages.WorkerMessage | bytes], reason: str
) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        other = Client(tmp_path / "control.sock")
        await other.send(hello(OTHER))
        await other.receive()
        await client.send(*sent)
        while await client.receive() is not None:
            pass
        assert server.send(OTHER, messages.FormedMark(generation=1)), "the others notice nothing"
        assert await other.receive() == messages.FormedMark(generation=1)
        other.socket.close()
        accepted = sent[0] == hello()
        assert [key for key, _ in supervisor.accused] == ([KEY] if accepted else [])

    serve(tmp_path, use)
    dropped = [e for e in log.entries if e["event"] == "control_client_dropped"]
    assert len(dropped) == 1
    assert reason in dropped[0]["reason"]


def test_a_worker_that_does_not_read_is_dropped(tmp_path: Path, log: LogCapture) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        await client.send(hello())
        assert isinstance(await client.receive(), messages.Welcome)
        big = messages.Leave(reason="x" * 2**20)
        for _ in range(MAX_UNREAD_BYTES // 2**20 + 2):
            server.send(KEY, big)
        assert not any(entry["event"] != "control_client_dropped" for entry in log.entries)

    serve(tmp_path, use)
    assert "unread" in log.entries[0]["reason"]


def test_a_reconnected_worker_replaces_its_old_connection(tmp_path: Path) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        await client.send(hello())
        await client.receive()
        again = Client(tmp_path / "control.sock")
        await again.send(hello())
        assert isinstance(await again.receive(), messages.Welcome)
        assert await client.receive() is None
        assert server.send(KEY, messages.FormedMark(generation=3))
        assert await again.receive() == messages.FormedMark(generation=3)
        again.socket.close()

    serve(tmp_path, use)


def test_last_words_come_before_the_end(tmp_path: Path) -> None:
    async def use(server: ControlServer, supervisor: Supervisor, client: Client) -> None:
        order: list[str] = []
        server.when_closed(KEY, 10.0, lambda: order.append("no connection"))
        await client.send(hello())
        await client.receive()
        for number in range(100):
            await client.send(progress(str(number)))
        client.socket.shutdown(socket.SHUT_WR)
        done = asyncio.Event()
        server.when_closed(KEY, 10.0, done.set)
        await asyncio.wait_for(done.wait(), 60)
        assert supervisor.taken.qsize() == 100
        assert order == ["no connection"]

    serve(tmp_path, use)
