"""The metadata services of AWS, GCP and Azure, as their documentation describes them, in one process.

It speaks their protocols: headers that are missing are refused, tokens expire, nothing is 404 (AWS),
GCP holds an answer back until the value's ETag changes, Azure wants its events approved.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKENS = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP = "/computeMetadata/v1/instance/"
EVENTS = "/metadata/scheduledevents"
VM_NAME = "/metadata/instance/compute/name"


@dataclass
class Metadata:
    """What the services say now; a test changes it with `set`."""

    aws: dict[str, str] = field(default_factory=dict)
    """Body by path; a path that is missing is 404."""
    gcp: dict[str, str] = field(
        default_factory=lambda: {"preempted": "FALSE", "maintenance-event": "NONE"}
    )
    azure: list[dict[str, Any]] = field(default_factory=list)
    azure_body: str | None = None
    """In place of the document of events."""
    vm: str = "vm-1"
    tokens: dict[str, float] = field(default_factory=dict)
    """Token to the moment at which it expires."""
    token_life_s: float | None = None
    """In place of the life that was asked for."""
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """(method, path with query, status) of each request."""
    approved: list[str] = field(default_factory=list)
    at_approval: Callable[[], object] = lambda: None
    """Called before an approval is answered."""
    status: int | None = None
    """In place of every answer."""
    flavor: str = "Google"
    clock_ahead_s: float = 0.0
    """How far the services' clock is ahead of this machine's."""
    polled: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for a change."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, **changes: Any) -> None:
        with self.changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def set_gcp(self, key: str, value: str) -> None:
        self.set(gcp={**self.gcp, key: value})

    def time(self, left_s: float) -> float:
        """Unix time, by the services' clock, that is this far ahead."""
        return time.time() + self.clock_ahead_s + left_s

    def count(self, part: str) -> int:
        """Requests whose path contains this."""
        return sum(part in path for _, path, _ in self.requests)


@dataclass
class Running:
    url: str
    metadata: Metadata
    server: ThreadingHTTPServer


@contextmanager
def metadata_server(port: int = 0) -> Iterator[Running]:
    """The services at ``url``, until the end of the block."""
    metadata = Metadata()
    handler = type("Handler", (_Handler,), {"metadata": metadata})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield Running(f"http://127.0.0.1:{server.server_port}", metadata, server)
    finally:
        metadata.set(status=503)  # ends the long polls
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    metadata: Metadata

    def do_GET(self) -> None:
        path, metadata = urlsplit(self.path).path, self.metadata
        if metadata.status is not None:
            self._answer(metadata.status, "in trouble")
        elif path.startswith("/latest/"):
            self._aws(path)
        elif path.startswith(GCP):
            self._gcp(path.removeprefix(GCP))
        elif path in (EVENTS, VM_NAME):
            self._azure(path)
        else:
            self._answer(404, "")

    def do_PUT(self) -> None:
        asked_s = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        if self.path != TOKENS or asked_s is None or "X-Forwarded-For" in self.headers:
            self._answer(400, "")
            return
        life_s = self.metadata.token_life_s
        token = f"token-{len(self.metadata.tokens)}"
        self.metadata.tokens[token] = time.monotonic() + (
            float(asked_s) if life_s is None else life_s
        )
        self._answer(200, token)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if urlsplit(self.path).path != EVENTS or self.headers["Metadata"] != "true":
            self._answer(400, "")
            return
        ids = [request["EventId"] for request in body["StartRequests"]]
        known = {event["EventId"] for event in self.metadata.azure}
        if not known.issuperset(ids):
            self._answer(400, "no such event")
            return
        self.metadata.at_approval()
        self.metadata.approved += ids
        self._answer(200, "")

    def _aws(self, path: str) -> None:
        expires_s = self.metadata.tokens.get(self.headers["X-aws-ec2-metadata-token"] or "", 0.0)
        if expires_s < time.monotonic():
            self._answer(401, "Unauthorized")
            return
        body = self.metadata.aws.get(path)
        self._answer(404 if body is None else 200, body or "")

    def _gcp(self, key: str) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self._answer(403, "Metadata-Flavor is missing")
            return
        metadata, query = self.metadata, parse_qs(urlsplit(self.path).query)

        def etag() -> str:
            return f"etag-{metadata.gcp[key]}"

        if query.get("wait_for_change") == ["true"]:
            with metadata.changed:
                metadata.polled.set()
                last = query.get("last_etag", [""])[0]
                metadata.changed.wait_for(
                    lambda: metadata.status is not None or etag() != last,
                    float(query["timeout_sec"][0]),
                )
        flavor = {"Metadata-Flavor": metadata.flavor} if metadata.flavor else {}
        if metadata.status is not None:
            self._answer(metadata.status, "in trouble")
        else:
            self._answer(200, metadata.gcp[key], {"ETag": etag(), **flavor})

    def _azure(self, path: str) -> None:
        if self.headers["Metadata"] != "true" or "api-version=" not in self.path:
            self._answer(400, "Bad request: Metadata header or api-version is missing")
        elif path == VM_NAME:
            self._answer(200, self.metadata.vm)
        else:
            document = {"DocumentIncarnation": 1, "Events": self.metadata.azure}
            body = self.metadata.azure_body
            self._answer(200, json.dumps(document) if body is None else body)

    def _answer(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.metadata.requests.append((self.command, self.path, status))
        try:
            self.send_response_only(status)
            self.send_header("Date", formatdate(self.metadata.time(0.0), usegmt=True))
            self.send_header("Content-Length", str(len(body.encode())))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())
        except OSError:
            self.close_connection = True  # the client went away while it waited

    def log_message(self, format: str, *args: object) -> None:
        """Requests are kept in ``requests``."""


def azure_event(event: str = "event-1", kind: str = "Preempt", **fields: Any) -> dict[str, Any]:
    """A scheduled event of the machine ``vm-1``, 30 s ahead unless it says otherwise."""
    return {
        "EventId": event,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["vm-1"],
        "EventStatus": "Scheduled",
        "NotBefore": formatdate(time.time() + 30, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }
