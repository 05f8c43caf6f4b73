"""HTTP for monitoring: ``/metrics``, ``/healthz`` and ``/readyz``.

The event loop accepts, a thread of its own serves each request: an idle or slow client holds one
thread for at most ten seconds and blocks nobody.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from rallypoint.daemon.shared.errors import ConfigError

CLIENT_TIMEOUT_S: Final = 10

_log = structlog.get_logger(__name__)


class MonitoringServer:
    """Binds when it is made, so that a taken port is known before anything else starts.

    ``why_not_ready`` returns "" when ready, else the reason. Raises `ConfigError`.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
    ) -> None:
        try:
            self._server = _Server((bind, port), _Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "the port is in use" if taken else str(error.strerror or error)
            raise ConfigError(
                f"metrics.bind:port = {bind}:{port}: {why}; give another one with --metrics-port "
                "(0 picks a free one)"
            ) from error
        self._server.set_app(_application(make_wsgi_app(registry), why_not_ready))
        self._host = bind

    @property
    def url(self) -> str:
        """The whole address of /metrics."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/metrics"

    def start(self) -> None:
        """Serve from the running event loop."""
        asyncio.get_running_loop().add_reader(self._server.fileno(), self._server.handle_request)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._server.fileno())
        self._server.server_close()


def _application(metrics: WSGIApplication, why_not_ready: Callable[[], str]) -> WSGIApplication:
    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start)
            case "/healthz":
                return _text(start, "200 OK", "ok")
            case "/readyz":
                reason = why_not_ready()
                status = "503 Service Unavailable" if reason else "200 OK"
                return _text(start, status, reason or "ok")
            case _:
                return _text(start, "404 Not Found", "there are /metrics, /healthz and /readyz")

    return application


def _text(start: StartResponse, status: str, body: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{body}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news; the standard library would write them to stderr."""
        _log.debug("http_request", line=format % args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    timeout = 0  # handle_request never waits: the event loop calls it when somebody is there

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        self.socket.setblocking(False)

    def server_bind(self) -> None:
        """Without the reverse look-up of the standard library, which waits for a dead DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("http_client_failed", client=str(client_address), exc_info=True)
