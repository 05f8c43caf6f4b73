"""Calls to an etcd cluster: one channel per endpoint, failover, deadlines, TLS, token.

Every call has a deadline per try and one in all. A try that gets no answer moves on to the next
endpoint, for all later calls and for the streams that were open on it; so a frozen member is left
after one try, long before the ping of its channel fails.
"""

import asyncio
import itertools
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from rallypoint.daemon.errors import StoreError, StoreUnavailableError
from rallypoint.daemon.etcd import meaning, rpc_pb2
from rallypoint.daemon.shared.errors import ConfigError

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    # A frozen server sends neither FIN nor RST. etcd refuses pings more often than each 5 s, and
    # grpc's own timeout of a ping is 60 s whatever the keepalive timeout says.
    ("grpc.keepalive_time_ms", 8_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_HAS_LEADER: Final = ("hasleader", "true")
"""Ends a stream when its member loses the quorum; without it such a stream is silent."""
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5)
"""Between rounds over all endpoints; the last one repeats."""

_log = structlog.get_logger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Access:
    """Where a cluster is, and how to be let in."""

    endpoints: tuple[str, ...]
    """``host:port`` or ``[IPv6 address]:port`` of each member."""
    ca_file: Path | None = None
    """PEM of the authority that signed the servers' certificates; None: no TLS."""
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password_file: Path | None = None
    """Its first line is the password; read again whenever a token is asked for."""


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """One method of etcd's API."""

    service: str
    name: str
    response: type[Response]

    @property
    def path(self) -> str:
        return f"/etcdserverpb.{self.service}/{self.name}"

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()


AUTHENTICATE: Final = Method[rpc_pb2.AuthenticateRequest, rpc_pb2.AuthenticateResponse](
    "Auth", "Authenticate", rpc_pb2.AuthenticateResponse
)


class Stream(Generic[Request, Response]):
    """An open two-way stream, used within `Connection.stream`. Both calls raise
    `StoreUnavailableError` once it has ended or was left."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._left = asyncio.get_running_loop().create_future()

    async def send(self, request: Request) -> None:
        await self._unless_left(self._call.write(request), None)

    async def receive(self, within_s: float | None = None) -> Response:
        """The next message, ``within_s``."""
        message = await self._unless_left(self._call.read(), within_s)
        if message is grpc.aio.EOF:
            raise StoreUnavailableError("the server ended the stream")
        received: Response = message
        return received

    def leave(self) -> None:
        """End it, also for whoever waits. To cancel the call is not enough: a write that waits for
        the connection does not notice."""
        if not self._left.done():
            self._left.set_result(None)
        self._call.cancel()

    async def _unless_left(self, work: Coroutine[Any, Any, Any], within_s: float | None) -> Any:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (task, self._left), timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._left.done():
                raise StoreUnavailableError("the stream was left")
            if not task.done():
                raise StoreUnavailableError(f"no answer within {within_s:.2f} s")
            return task.result()
        finally:
            task.cancel()


Observe = Callable[[str, float, StoreError | None], None]
"""Takes the label of a method, how long a call of it took, seconds, all tries included, and why it failed."""


class Connection:
    """Calls with failover. ``try_s`` bounds a try, ``total_s`` a call with all its tries, seconds.
    ``observe`` is told of each call, also of one that fails.

    Raises `ConfigError` when a file of ``access`` cannot be read.
    """

    def __init__(
        self,
        access: Access,
        *,
        try_s: float,
        total_s: float,
        observe: Observe = lambda label, seconds, error: None,
    ) -> None:
        self._access = access
        self._observe = observe
        self.try_s = try_s
        self.total_s = total_s
        self._credentials = _credentials(access)
        if access.password_file is not None:
            _read(access.password_file)
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._streams: dict[Stream[Any, Any], int] = {}
        self._current = 0
        self._left = 0
        """Endpoints left since a call was answered."""
        self._token: str | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    async def call(
        self, method: Method[Request, Response], request: Request
    ) -> tuple[Response, bool]:
        """The answer, and whether an earlier try got none and may have been carried out as well.

        Raises the errors of `meaning.of`; `StoreUnavailableError` once ``total_s`` have passed.
        """
        return await self._failover(method, lambda at, s: self._unary(at, method, request, s))

    async def ask(self, method: Method[Request, Response], request: Request) -> Response:
        """One question and one answer over a stream, with failover."""

        async def once(at: int, timeout_s: float) -> Response:
            async with self._open(at, method, timeout_s) as stream:
                await stream.send(request)
                return await stream.receive()

        return (await self._failover(method, once))[0]

    @asynccontextmanager
    async def stream(
        self, method: Method[Request, Response]
    ) -> AsyncIterator[Stream[Request, Response]]:
        """A stream without end at the present endpoint. What ends it raises `StoreUnavailableError`,
        and makes the next endpoint the present one; a move made by other calls ends it too."""
        self._require_open()
        at = self._current
        try:
            with self._translated(method, at):
                async with self._open(at, method, None) as stream:
                    yield stream
        except StoreUnavailableError as error:
            self._move(at, str(error))
            raise

    async def renew_token(self) -> None:
        """Authenticate anew at the present endpoint, where user and password are given."""
        with self._translated(AUTHENTICATE, self._current):
            await self._authenticate(self._current, self.try_s)

    async def close(self) -> None:
        """End all calls and streams; they raise `StoreUnavailableError`."""
        self._closed = True
        for stream in self._streams:
            stream.leave()
        for channel in self._channels.values():
            await channel.close()

    # --- failover -----------------------------------------------------------------------------

    @contextmanager
    def timed(self, method: Method[Any, Any]) -> Iterator[None]:
        """Measure what is done inside as one call."""
        began_s, failed = time.monotonic(), None
        try:
            yield
        except StoreError as error:
            failed = error
            raise
        finally:
            self._observe(method.label, time.monotonic() - began_s, failed)

    async def _failover(self, method: Method[Any, Response], once: Any) -> tuple[Response, bool]:
        with self.timed(method):
            return await self._try_all(method, once)

    async def _try_all(self, method: Method[Any, Response], once: Any) -> tuple[Response, bool]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.total_s
        for tries in itertools.count():
            self._require_open()
            at, left_s = self._current, deadline - loop.time()
            try:
                with self._translated(method, at):
                    answer = await once(at, max(0.01, min(self.try_s, left_s)))
                self._left = 0
                return answer, tries > 0
            except StoreUnavailableError as error:
                self._require_open()
                self._move(at, str(error))
                rounds, rest = divmod(tries + 1, len(self._access.endpoints))
                pause_s = 0.0 if rest else _PAUSES_S[min(rounds, len(_PAUSES_S)) - 1]
                if loop.time() + pause_s >= deadline:
                    raise StoreUnavailableError(
                        f"no answer within {self.total_s:g} s and {tries + 1} tries; the last: {error}"
                    ) from error
            await asyncio.sleep(pause_s)
        raise AssertionError  # the loop above has no other end

    def _move(self, away_from: int, reason: str) -> None:
        """Make the next endpoint the present one, unless another call has done so already."""
        endpoints = self._access.endpoints
        if self._closed or self._current != away_from or len(endpoints) == 1:
            return
        self._current = (away_from + 1) % len(endpoints)
        self._left += 1
        # One round says all: on a node that is cut off there are several rounds a second.
        say = _log.info if self._left <= len(endpoints) else _log.debug
        say("etcd_endpoint_left", reason=reason, next=endpoints[self._current])
        for stream, at in self._streams.items():
            if at == away_from:
                stream.leave()

    @contextmanager
    def _translated(self, method: Method[Any, Any], at: int) -> Iterator[None]:
        """Turn grpc's errors into ours. A call that `close` cancelled, not its task, ends like one
        without an answer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise meaning.of(error, method.name, self._access.endpoints[at]) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise StoreUnavailableError(f"etcd {method.name}: the call was ended here") from error

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the connection to etcd is closed")

    # --- one endpoint -------------------------------------------------------------------------

    def _channel(self, at: int) -> grpc.aio.Channel:
        if at not in self._channels:
            target = self._access.endpoints[at]
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(target, self._credentials, options=_OPTIONS)
            self._channels[at] = channel
        return self._channels[at]

    async def _unary(
        self, at: int, method: Method[Request, Response], request: Request, timeout_s: float
    ) -> Response:
        for renewed in (False, True):
            metadata = await self._metadata(at, timeout_s)
            try:
                return await self._send(at, method, request, timeout_s, metadata)
            except grpc.aio.AioRpcError as error:
                if renewed or self._access.user is None or not meaning.renews_token(error):
                    raise
                self._token = None
        raise AssertionError  # the loop above has no other end

    async def _send(
        self,
        at: int,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Response:
        call = self._channel(at).unary_unary(
            method.path,
            request_serializer=_serialize,
            response_deserializer=method.response.FromString,
        )
        response: Response = await call(request, timeout=timeout_s, metadata=metadata)
        return response

    @asynccontextmanager
    async def _open(
        self, at: int, method: Method[Request, Response], timeout_s: float | None
    ) -> AsyncIterator[Stream[Request, Response]]:
        metadata = await self._metadata(at, self.try_s)
        call = self._channel(at).stream_stream(
            method.path,
            request_serializer=_serialize,
            response_deserializer=method.response.FromString,
        )(timeout=timeout_s, metadata=(_HAS_LEADER, *metadata))
        stream = Stream[Request, Response](call)
        self._streams[stream] = at
        try:
            yield stream
        finally:
            del self._streams[stream]
            stream.leave()

    async def _metadata(self, at: int, timeout_s: float) -> tuple[tuple[str, str], ...]:
        if self._access.user is not None and self._token is None:
            await self._authenticate(at, timeout_s)
        return () if self._token is None else (("token", self._token),)

    async def _authenticate(self, at: int, timeout_s: float) -> None:
        user, file = self._access.user, self._access.password_file
        if user is None or file is None:
            return
        password = _read(file).decode().partition("\n")[0].rstrip("\r")
        request = rpc_pb2.AuthenticateRequest(name=user, password=password)
        with self.timed(AUTHENTICATE):
            self._token = (await self._send(at, AUTHENTICATE, request, timeout_s)).token


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _credentials(access: Access) -> grpc.ChannelCredentials | None:
    if access.ca_file is None:
        return None
    files = (access.ca_file, access.key_file, access.cert_file)
    authority, key, certificate = (None if file is None else _read(file) for file in files)
    _require_pem(access)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _require_pem(access: Access) -> None:
    """grpc takes any bytes, and then says of every connection that it failed."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"{access.ca_file}: no PEM certificate: {error}") from error
    if access.cert_file is not None:
        try:
            context.load_cert_chain(access.cert_file, access.key_file, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"{access.cert_file} and {access.key_file}: no PEM certificate and its key, unencrypted: "
                f"{error}"
            ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
