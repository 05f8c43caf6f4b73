"""HTTP for monitoring: ``/metrics``, ``/healthz`` and ``/readyz``, on the supervisor's event loop.

A connection gets one answer, and `CLIENT_TIMEOUT_S` for all of it, TLS handshake included. Idle and
slow clients hold a task each, no thread; where there are too many, the oldest goes. So none of them
keeps another from its answer.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, NamedTuple

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rallypoint.daemon.executors.httpaccess import Users, server_context
from rallypoint.daemon.shared.config import MetricsSection
from rallypoint.daemon.shared.errors import ConfigError

CLIENT_TIMEOUT_S: Final = 10.0
MAX_CLIENTS: Final = 64
MAX_REQUEST_BYTES: Final = 8192
_GOOD_BYE_S: Final = 1.0
_NO_DESCRIPTOR_S: Final = 0.5
_TEXT: Final = "text/plain; charset=utf-8"
_REALM: Final = 'WWW-Authenticate: Basic realm="rallypoint", charset="UTF-8"\r\n'

_log = structlog.get_logger(__name__)


class Request(NamedTuple):
    """What a client asks: the path without its query, and headers by their lower-case name."""

    method: str
    path: str
    headers: dict[str, str]


class Answer(NamedTuple):
    """Status, body and its type."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT


class MonitoringServer:
    """Binds when it is made, so that a taken port is known before anything else starts.

    ``refresh`` is called before metrics are shown; ``why_not_ready`` returns "" when ready, else the
    reason. Raises `ConfigError` for a port or files that cannot be used.
    """

    def __init__(
        self,
        section: MetricsSection,
        registry: CollectorRegistry,
        *,
        refresh: Callable[[], None],
        why_not_ready: Callable[[], str],
    ) -> None:
        self._tls = server_context(section)
        self._users = None if section.users_file is None else Users(section.users_file)
        self._socket = _bind(section.bind, section.port)
        self._host = section.bind
        self._port = self._socket.getsockname()[1]
        self._registry = registry
        self._refresh = refresh
        self._why_not_ready = why_not_ready
        self._clients: dict[asyncio.Task[None], None] = {}

    @property
    def url(self) -> str:
        """The whole address of /metrics, also after the end."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{host}:{self._port}/metrics"

    def start(self) -> None:
        """Serve from the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Serve nobody any more."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        for task in self._clients:
            task.cancel()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError as error:
            _log.warning("metrics_client_not_accepted", reason=str(error))
            loop.remove_reader(self._socket.fileno())  # else this would be called without a pause
            loop.call_later(_NO_DESCRIPTOR_S, self._again)
            return
        if len(self._clients) >= MAX_CLIENTS:
            next(iter(self._clients)).cancel()
        client.setblocking(False)
        task = loop.create_task(self._serve(client), name="metrics client")
        self._clients[task] = None
        task.add_done_callback(self._clients.pop)

    def _again(self) -> None:
        if self._socket.fileno() >= 0:
            self.start()

    async def _serve(self, client: socket.socket) -> None:
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                reader, writer = await self._open(client)
                try:
                    await self._talk(reader, writer)
                    writer.close()
                    await writer.wait_closed()
                finally:
                    writer.transport.abort()
        except (OSError, EOFError) as error:  # also of the handshake, and the time that is over
            _log.debug("metrics_client_failed", reason=str(error) or type(error).__name__)
        except Exception:  # noqa: BLE001 - a fault in what is shown must not end the supervisor
            _log.exception("metrics_not_shown")

    async def _open(
        self, client: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(MAX_REQUEST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        if self._tls is None:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, client)
        else:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._tls.get(),
                ssl_handshake_timeout=CLIENT_TIMEOUT_S,
                ssl_shutdown_timeout=_GOOD_BYE_S,
            )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = None
        try:
            request = parse(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            text = f"a request has at most {MAX_REQUEST_BYTES} bytes\n"
            answer = Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text.encode())
        else:
            answer = await self._answer(request)
        status, body, content_type = answer
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
            f"{_REALM if status is HTTPStatus.UNAUTHORIZED else ''}Connection: close\r\n\r\n"
        )
        only_head = request is not None and request.method == "HEAD"
        writer.write(head.encode() + (b"" if only_head else body))
        await writer.drain()

    async def _answer(self, request: Request | None) -> Answer:
        if request is None:
            return _say(HTTPStatus.BAD_REQUEST, "this is no HTTP request")
        if request.method not in ("GET", "HEAD"):
            return _say(HTTPStatus.METHOD_NOT_ALLOWED, "there is only GET and HEAD")
        match request.path:
            case "/healthz":
                return _say(HTTPStatus.OK, "ok")
            case "/readyz":
                reason = self._why_not_ready()
                if not reason:
                    return _say(HTTPStatus.OK, "ok")
                shown = reason if await self._trusts(request) else "not ready"
                return _say(HTTPStatus.SERVICE_UNAVAILABLE, shown)
            case "/metrics" if await self._trusts(request):
                return await self._metrics(request)
            case "/metrics":
                return _say(HTTPStatus.UNAUTHORIZED, "a user of metrics.users_file, please")
            case _:
                return _say(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz")

    async def _trusts(self, request: Request) -> bool:
        users, header = self._users, request.headers.get("authorization")
        return users is None or (header is not None and await users.allows(header))

    async def _metrics(self, request: Request) -> Answer:
        self._refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # Not here: a thousand lines take milliseconds, and decisions do not wait for them.
        body = await asyncio.to_thread(encode, self._registry)
        return Answer(HTTPStatus.OK, body, content_type)


def parse(data: bytes) -> Request | None:
    """A request up to its empty line; None for what is none."""
    line, *rest = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        return None
    headers = (field.partition(":") for field in rest)
    named = {name.strip().lower(): value.strip() for name, _, value in headers}
    return Request(words[0], words[1].partition("?")[0], named)


def _say(status: HTTPStatus, text: str) -> Answer:
    return Answer(status, f"{text}\n".encode())


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=MAX_CLIENTS)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is in use" if taken else str(error.strerror or error)
        raise ConfigError(
            f"metrics.bind:port = {host}:{port}: {why}; give another one with --metrics-port "
            "(0 picks a free one)"
        ) from error
    bound.setblocking(False)
    return bound
