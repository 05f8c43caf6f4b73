"""One HTTP request to a metadata service: a plain connection, so that no proxy of the environment is
ever asked, no redirect is followed, and a wait can be cancelled at any time."""

import asyncio
import http.client
import io
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Final, cast
from urllib.parse import urlsplit

from rallypoint.daemon.notices.notice import MetadataError

TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 2**18


@dataclass(frozen=True)
class Answer:
    """Status, headers and text of an answer."""

    status: int
    headers: Message
    text: str

    @property
    def now_unix_s(self) -> float:
        """The service's own clock (its ``Date`` header, to the second), else this machine's: a deadline is
        compared with the clock that it was written by."""
        try:
            return parsedate_to_datetime(self.headers["Date"]).timestamp()
        except (TypeError, ValueError):
            return time.time()

    def expect_ok(self, what: str) -> None:
        """Raises `MetadataError` for any status but 200."""
        if self.status != 200:
            raise MetadataError(f"{what}: status {self.status} ({self.text.strip()[:80]!r})")


async def ask(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    body: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask ``base`` (``http://HOST[:PORT]``) for ``path``. Raises `MetadataError` when no whole answer
    comes within ``timeout_s``."""
    address = urlsplit(base)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if method != "GET":
        lines.append(f"Content-Length: {len(body.encode())}")
    request = "\r\n".join((*lines, "", body)).encode()
    try:
        async with asyncio.timeout(timeout_s):
            data = await _exchange(address.hostname or "", address.port or 80, request)
    except TimeoutError as error:
        raise MetadataError(f"{base}{path}: no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise MetadataError(f"{base}{path}: {error.strerror or error}") from error
    return _parse(data, method, f"{base}{path}")


async def _exchange(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        data = b""
        while chunk := await reader.read(65536):
            data += chunk
            if len(data) > _MOST_BYTES:
                raise OSError(f"the answer is over {_MOST_BYTES} bytes")
        return data
    finally:
        writer.close()


class _Received:
    """What `http.client.HTTPResponse` needs of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parse(data: bytes, method: str, what: str) -> Answer:
    response = http.client.HTTPResponse(cast(socket.socket, _Received(data)), method=method)
    try:
        response.begin()
        text = response.read().decode()
    except (http.client.HTTPException, UnicodeDecodeError) as error:
        raise MetadataError(f"{what}: no HTTP answer ({type(error).__name__}: {error})") from error
    return Answer(response.status, response.headers, text)
