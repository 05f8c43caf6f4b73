"""An HTTP proxy in front of a store that answers what a test says, or loses the store's answer."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

What = Literal["pass", "lose", "refuse", "unavailable"]
Decide = Callable[[str, str], What]
"""(method, path) -> let it pass, carry it out and cut the connection, cut it at once, or answer 503."""

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


class HttpProxy:
    """Forwards to ``endpoint``; `http_proxy` starts it."""

    def __init__(self, endpoint: str) -> None:
        self.target = urlsplit(endpoint).netloc
        self.decide: Decide = lambda method, path: "pass"
        self.fired: list[tuple[What, str]] = []
        """What was not let pass, and the path."""
        self.requests = 0
        self.endpoint = ""

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        """One request, as it was decided."""
        body = _body(request)
        self.requests += 1
        what = self.decide(request.command, request.path)
        if what != "pass":
            self.fired.append((what, request.path))
        if what == "unavailable":
            request.send_error(503, "Slow Down")
            return
        if what != "refuse":
            answer = self._ask(request, body)
            if what == "pass":
                _relay(request, *answer)
                return
        request.close_connection = True

    def _ask(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=30)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        headers["Content-Length"] = str(len(body))
        try:
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    parts = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)


def _relay(
    request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], body: bytes
) -> None:
    request.send_response_only(status)
    for name, value in headers:
        if name.lower() not in _HOP_BY_HOP:
            request.send_header(name, value)
    if status not in (204, 304) and not any(
        name.lower() == "content-length" for name, _ in headers
    ):
        request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@contextlib.contextmanager
def http_proxy(endpoint: str) -> Iterator[HttpProxy]:
    """A proxy to an ``http://host:port``, on a free port of its own."""
    proxy = HttpProxy(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # a client that left
                super().handle_one_request()

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    def handle(request: BaseHTTPRequestHandler) -> None:
        proxy.forward(request)

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        setattr(Handler, f"do_{method}", handle)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
