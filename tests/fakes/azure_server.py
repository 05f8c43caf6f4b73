"""A server of the Azure Blob Storage REST API on loopback, as far as checkpoints use it: prints its port,
ends with its standard input. By the service's documentation ("Put Blob", "Put Block", "Put Block List",
"Get Blob", "Get Blob Properties", "Delete Blob", "List Blobs"); signatures are not verified."""

import base64
import binascii
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ACCOUNT: Final = "emulator"
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, content."""
Operation = Callable[[str, str, dict[str, str], bytes], Answer]
"""Of (container, blob, query, body)."""

PAGE: Final = 10
"""Blobs in one answer to a listing at most; the service may always give fewer than asked."""


@dataclass
class Blob:
    """A committed block blob."""

    data: bytes
    etag: str
    at_unix_s: float = field(default_factory=time.time)

    def headers(self) -> dict[str, str]:
        return {
            "ETag": self.etag,
            "Last-Modified": formatdate(self.at_unix_s, usegmt=True),
            "x-ms-creation-time": formatdate(self.at_unix_s, usegmt=True),
            "x-ms-blob-type": "BlockBlob",
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }


@dataclass
class Container:
    """Blobs by name, and blocks that are staged and not committed."""

    blobs: dict[str, Blob] = field(default_factory=dict)
    staged: dict[str, dict[str, bytes]] = field(default_factory=dict)


class Refusal(Exception):
    """An answer that is an error, with the service's own code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    containers: ClassVar[dict[str, Container]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    writes: ClassVar[int] = 0

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, operation: Operation) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        _, account, container, *rest = (*unquote(url.path).split("/", 3), "")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            if account != ACCOUNT or not self.headers.get("Authorization", "").startswith(
                f"SharedKey {ACCOUNT}:"
            ):
                raise Refusal(403, "AuthenticationFailed")
            with self.lock:
                status, headers, content = operation(container, rest[0], query, body)
        except Refusal as refusal:
            status, headers = refusal.status, {"x-ms-error-code": refusal.code}
            content = f"<Error><Code>{refusal.code}</Code><Message>no</Message></Error>".encode()
            headers["Content-Type"] = "application/xml"
        self.send_response(status)
        for name, value in {"x-ms-version": "2021-12-02", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _container(self, name: str) -> Container:
        if name not in self.containers:
            raise Refusal(404, "ContainerNotFound")
        return self.containers[name]

    def _blob(self, container: str, name: str) -> Blob:
        blobs = self._container(container).blobs
        if name not in blobs:
            raise Refusal(404, "BlobNotFound")
        return blobs[name]

    def _get(self, container: str, name: str, query: dict[str, str], body: bytes) -> Answer:
        if query.get("comp") == "list":
            return self._list(container, query)
        if not name:
            self._container(container)
            at = formatdate(usegmt=True)
            return 200, {"ETag": '"0"', "Last-Modified": at}, b""
        blob = self._blob(container, name)
        asked = self.headers.get("x-ms-range") or self.headers.get("Range")
        if asked is None or self.command == "HEAD":
            return 200, blob.headers(), blob.data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, size = int(first), len(blob.data)
        if begin >= size:
            raise Refusal(416, "InvalidRange")
        end = min(int(last) + 1, size) if last else size
        headers = {**blob.headers(), "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        return 206, headers, blob.data[begin:end]

    def _list(self, container: str, query: dict[str, str]) -> Answer:
        blobs, prefix = self._container(container).blobs, query.get("prefix", "")
        delimiter, marker = query.get("delimiter", ""), query.get("marker", "")
        entries: dict[str, str] = {}
        for name in sorted(blobs):
            if name.startswith(prefix):
                head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if delimiter and found:
                    folder = f"{prefix}{head}{delimiter}"
                    entries[folder] = f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>"
                else:
                    entries[name] = _entry(name, blobs[name])
        names = [name for name in sorted(entries) if name >= marker]
        page = names[: min(PAGE, int(query.get("maxresults", PAGE)))]
        following = names[len(page)] if len(names) > len(page) else ""
        text = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{container}">'
            f"<Blobs>{''.join(entries[name] for name in page)}</Blobs>"
            f"<NextMarker>{escape(following)}</NextMarker></EnumerationResults>"
        )
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def _put(self, container: str, name: str, query: dict[str, str], body: bytes) -> Answer:
        if query.get("restype") == "container":
            if container in self.containers:
                raise Refusal(409, "ContainerAlreadyExists")
            self.containers[container] = Container()
            return 201, {"ETag": '"0"', "Last-Modified": formatdate(usegmt=True)}, b""
        place = self._container(container)
        if query.get("comp") == "block":
            place.staged.setdefault(name, {})[_block(query["blockid"])] = body
            return 201, {}, b""
        if self.headers.get("If-None-Match") == "*" and name in place.blobs:
            raise Refusal(409, "BlobAlreadyExists")
        if query.get("comp") == "blocklist":
            staged = place.staged.pop(name, {})
            ids = [_block(node.text or "") for node in ElementTree.fromstring(body)]  # noqa: S314
            if any(number not in staged for number in ids):
                raise Refusal(400, "InvalidBlockList")
            body = b"".join(staged[number] for number in ids)
        elif self.headers.get("x-ms-blob-type") != "BlockBlob":
            raise Refusal(400, "InvalidHeaderValue")
        Handler.writes += 1
        place.staged.pop(name, None)
        blob = place.blobs[name] = Blob(body, f'"0x{Handler.writes:X}"')
        return 201, {"ETag": blob.etag, "Last-Modified": blob.headers()["Last-Modified"]}, b""

    def _delete(self, container: str, name: str, query: dict[str, str], body: bytes) -> Answer:
        self._blob(container, name)
        del self.containers[container].blobs[name]
        return 202, {}, b""


def _block(number: str) -> str:
    try:
        return base64.b64decode(number, validate=True).hex()
    except binascii.Error as error:
        raise Refusal(400, "InvalidQueryParameterValue") from error


def _entry(name: str, blob: Blob) -> str:
    properties = {
        "Creation-Time": formatdate(blob.at_unix_s, usegmt=True),
        "Last-Modified": formatdate(blob.at_unix_s, usegmt=True),
        "Etag": blob.etag,
        "Content-Length": len(blob.data),
        "Content-Type": "application/octet-stream",
        "BlobType": "BlockBlob",
        "LeaseStatus": "unlocked",
        "LeaseState": "available",
    }
    inner = "".join(f"<{key}>{escape(str(value))}</{key}>" for key, value in properties.items())
    return f"<Blob><Name>{escape(name)}</Name><Properties>{inner}</Properties><Metadata/></Blob>"


def main() -> None:
    """Serve until standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
