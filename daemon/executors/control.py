"""The control socket: supervisor and workers, frames of `daemon.shared.messages`.

A client that sends something this version cannot take, that says nothing, or that does not read
what it is sent is dropped with a log line; the others notice nothing. A worker that was accepted is
then reported, since it would only send the same again.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, cast

import structlog

from rallypoint.daemon.shared import messages, unixsocket
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.plan import WorkerKey

HELLO_TIMEOUT_S: Final = 10.0
MAX_UNREAD_BYTES: Final = 16 * 2**20
"""A client that leaves this much unread is dropped; a worker reconnects and is told anew."""
MAX_CLIENTS: Final = 1024

_log = structlog.get_logger(__name__)


class ControlHandler(Protocol):
    """What the supervisor does with what workers say."""

    def hello(self, message: messages.Hello) -> messages.Welcome | messages.Leave:
        """Accept or refuse a new connection."""
        ...

    def take(self, message: messages.WorkerMessage) -> None:
        """A message of an accepted worker, under that worker's own key. Raises `ProtocolError`."""
        ...

    def misbehaved(self, key: WorkerKey, reason: str) -> None:
        """The connection of this accepted worker was closed for what it sent on it."""
        ...


class ControlServer:
    """Listens at ``path`` and keeps at most one connection per worker: the newest."""

    def __init__(self, path: Path, handler: ControlHandler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._by_key: dict[WorkerKey, _Connection] = {}
        self._open: set[_Connection] = set()

    async def start(self) -> None:
        """Raises OSError."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), sock=unixsocket.listen(self._path)
        )

    def send(self, key: WorkerKey, message: messages.SupervisorMessage) -> bool:
        """Whether the worker is connected; one that is not is told when it says hello again."""
        connection = self._by_key.get(key)
        if connection is not None:
            connection.send(message)
        return connection is not None

    def drop(self, key: WorkerKey, reason: str) -> None:
        """Close the connection of a worker at once; what it still sends is not read."""
        connection = self._by_key.get(key)
        if connection is not None:
            connection.drop(reason)

    def when_closed(self, key: WorkerKey, within_s: float, callback: Callable[[], None]) -> None:
        """Call back once everything that the worker sent has been taken: when its connection has
        ended, or ``within_s`` has passed, or at once when it has none."""
        connection = self._by_key.get(key)
        if connection is None:
            callback()
        else:
            connection.call_when_closed(within_s, callback)

    async def close(self) -> None:
        """Close all connections and remove the socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._open):
            connection.close()
        self._path.unlink(missing_ok=True)

    # --- called by connections --------------------------------------------------------------

    def opened(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if len(self._open) >= MAX_CLIENTS:
            _log.warning("control_client_refused", reason=f"{MAX_CLIENTS} are connected already")
            return False
        self._open.add(connection)
        return True

    def closed(self, connection: "_Connection") -> None:
        """The connection has ended."""
        self._open.discard(connection)
        if connection.key is not None and self._by_key.get(connection.key) is connection:
            del self._by_key[connection.key]

    def misbehaved(self, key: WorkerKey, reason: str) -> None:
        """The connection of this worker was closed for what it sent."""
        self._handler.misbehaved(key, reason)

    def received(self, connection: "_Connection", message: messages.WorkerMessage) -> None:
        """Raises `ProtocolError` for a message that may not stand here."""
        if isinstance(message, messages.Hello):
            self._hello(connection, message)
        elif connection.key is None:
            raise ProtocolError(f"{type(message).__name__} came before Hello")
        elif message.key != connection.key:
            raise ProtocolError(
                f"{type(message).__name__} of {message.key} came on the connection of "
                f"{connection.key}"
            )
        else:
            self._handler.take(message)

    def _hello(self, connection: "_Connection", message: messages.Hello) -> None:
        if message.protocol != messages.PROTOCOL_VERSION:
            raise ProtocolError(
                f"worker {message.key} speaks protocol {message.protocol}, this supervisor speaks "
                f"{messages.PROTOCOL_VERSION}; run both from one installation"
            )
        answer = self._handler.hello(message)
        if isinstance(answer, messages.Welcome):
            earlier = self._by_key.get(message.key)
            if earlier is not None and earlier is not connection:
                earlier.close()
            connection.key = message.key
            self._by_key[message.key] = connection
        connection.send(answer)


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: ControlServer) -> None:
        self.key: WorkerKey | None = None
        self._server = server
        self._reader = messages.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._when_closed: list[Callable[[], None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream socket's always is one
        if not self._server.opened(self):
            self._transport.abort()
            return
        self._silence = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._said_nothing)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._server.closed(self)
        for callback in self._when_closed:
            callback()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._server.received(self, messages.decode_from_worker(body))
        except ProtocolError as error:
            self.drop(str(error))
            if self.key is not None:
                self._server.misbehaved(self.key, str(error))

    def send(self, message: messages.SupervisorMessage) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(messages.encode(message))
        unread = self._transport.get_write_buffer_size()
        if unread > MAX_UNREAD_BYTES:
            self.drop(f"it left {unread} bytes unread")

    def call_when_closed(self, within_s: float, callback: Callable[[], None]) -> None:
        """Call once, when this connection has ended or ``within_s`` has passed."""
        called = False

        def once() -> None:
            nonlocal called
            if not called:
                called = True
                callback()

        self._when_closed.append(once)
        asyncio.get_running_loop().call_later(within_s, once)

    def close(self) -> None:
        """Close after what was sent has gone out."""
        if self._transport is not None:
            self._transport.close()

    def _said_nothing(self) -> None:
        if self.key is None:
            self.drop(f"no Hello within {HELLO_TIMEOUT_S:g} s")

    def drop(self, reason: str) -> None:
        """Close at once, and say why."""
        _log.warning("control_client_dropped", worker=self.key, reason=reason)
        if self._transport is not None:
            self._transport.abort()
