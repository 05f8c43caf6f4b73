"""HTTP: metrics, health, readiness; nobody can block it."""

import asyncio
import base64
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
from structlog.testing import capture_logs

from rallypoint.daemon.executors import httpd
from rallypoint.daemon.executors.httpd import MAX_CLIENTS, MAX_REQUEST_BYTES, MonitoringServer
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared.config import MetricsSection
from rallypoint.daemon.shared.errors import ConfigError

PASSWORD = "nine lives: ün"  # noqa: S105 - of this test alone
HASH = bcrypt.hashpw(PASSWORD.encode(), b"$2b$04$" + b"nine.lives.of.a.cat..u").decode()
"""With a salt that stands here: it is in names of cases, which must be the same in each process."""
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
Ask = Callable[..., Awaitable[tuple[int, str]]]


def fetch(url: str, user: str | None, tls: ssl.SSLContext | None, **headers: str) -> Any:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own server
    if user is not None:
        encoded = base64.b64encode(user.encode()).decode()
        request.add_header("Authorization", f"Basic {encoded}")
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def serve(
    what: Callable[[MonitoringServer, Ask], Awaitable[None]],
    *,
    reasons: tuple[str, ...] = ("",),
    **section: Any,
) -> None:
    """Run ``what`` beside a server; its second argument asks for a path of it."""
    metrics, left = Metrics(), list(reasons)
    metrics.set("generation", 7)

    async def run() -> None:
        server = MonitoringServer(
            MetricsSection(port=0, **section),
            metrics.registry,
            refresh=lambda: metrics.set("slots", 3),
            why_not_ready=lambda: left.pop(0) if len(left) > 1 else left[0],
        )
        server.start()
        base = server.url.removesuffix("/metrics")

        async def ask(path: str, user: str | None = None, tls: Any = None, **headers: str) -> Any:
            return await asyncio.to_thread(fetch, base + path, user, tls, **headers)

        try:
            await what(server, ask)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def port_of(server: MonitoringServer) -> int:
    return int(server.url.removesuffix("/metrics").rpartition(":")[2])


def connect(port: int, number: int, sent: bytes) -> list[socket.socket]:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(number)]
    for client in clients:
        client.sendall(sent)
    return clients


@asynccontextmanager
async def connections(
    server: MonitoringServer, number: int, sent: bytes = b""
) -> AsyncIterator[None]:
    """Clients that have connected, sent this, and wait."""
    clients = await asyncio.to_thread(connect, port_of(server), number, sent)
    try:
        yield
    finally:
        for client in clients:
            client.close()


async def say(server: MonitoringServer, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionResetError:
        return b""  # it has not read all of it
    finally:
        writer.close()


def test_each_path_has_its_answer() -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        status, text = await ask("/metrics?x=1")
        assert status == 200
        assert "rallypoint_generation 7.0" in text
        assert "rallypoint_slots 3.0" in text
        assert await ask("/healthz") == (200, "ok\n")
        assert await ask("/readyz") == (503, "the job is starting\n")
        assert await ask("/readyz") == (200, "ok\n")
        assert (await ask("/else"))[0] == 404
        _, openmetrics = await ask("/metrics", Accept="application/openmetrics-text;version=1.0.0")
        assert openmetrics.endswith("# EOF\n")
        head = await say(server, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\n\r\n")

    serve(what, reasons=("the job is starting", ""))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01 no text\r\n\r\n", b"400"),
        (b"GET metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_gets_an_answer(sent: bytes, status: bytes) -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        assert (await say(server, sent)).split(b" ")[1] == status
        assert await ask("/healthz") == (200, "ok\n")

    serve(what)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT"], ids=["idle", "slow"])
def test_idle_and_slow_clients_block_nobody(sent: bytes) -> None:
    """More of them than there are places: the oldest go, and the newest is served."""

    async def what(server: MonitoringServer, ask: Ask) -> None:
        async with connections(server, MAX_CLIENTS + 8, sent):
            for _ in range(3):
                assert (await ask("/metrics"))[0] == 200

    serve(what)


@pytest.mark.slow
def test_a_client_that_drips_is_put_out_however_often_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(httpd, "CLIENT_TIMEOUT_S", 0.3)

    async def what(server: MonitoringServer, ask: Ask) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        over = asyncio.ensure_future(reader.read())
        while not over.done():  # bounded by the test's own limit
            writer.write(b"G")
            await asyncio.wait([over], timeout=0.05)
        assert over.exception() is not None or over.result() == b""
        writer.close()
        assert await ask("/healthz") == (200, "ok\n")

    serve(what)


def test_a_request_that_is_too_large_is_refused() -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        headers = b"X: " + b"x" * (3 * MAX_REQUEST_BYTES)
        answer = await say(server, b"GET /metrics HTTP/1.1\r\n" + headers)
        assert answer == b"" or answer.split(b" ")[1] == b"431"
        assert await ask("/healthz") == (200, "ok\n")

    serve(what)


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            MonitoringServer(
                MetricsSection(port=port),
                Metrics().registry,
                refresh=lambda: None,
                why_not_ready=str,
            )
    assert f"127.0.0.1:{port}: the port is in use" in str(caught.value)
    assert "--metrics-port" in str(caught.value)


# --- TLS ----------------------------------------------------------------------------------------


class Files:
    """A certificate authority, and what the server needs of it, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.section: dict[str, Any] = {}
        self.renew()

    def renew(self) -> None:
        """A new authority, and a new certificate in the same files."""
        self.ca = trustme.CA()
        server = self.ca.issue_cert("127.0.0.1")
        chain = b"".join(blob.bytes() for blob in server.cert_chain_pems)
        for name, data in (
            ("key_file", server.private_key_pem.bytes()),
            ("cert_file", chain),
            ("client_ca_file", self.ca.cert_pem.bytes()),
        ):
            path = self.directory / name
            (fresh := path.with_suffix(".new")).write_bytes(data)
            fresh.replace(path)
            self.section[name] = str(path)

    def tear(self) -> None:
        """The key is no key any more."""
        Path(self.section["key_file"]).write_text("torn")

    def without_client_ca(self) -> dict[str, Any]:
        return {name: path for name, path in self.section.items() if name != "client_ca_file"}

    def client(self, ca: trustme.CA | None = None) -> ssl.SSLContext:
        """A client that trusts the authority; with a certificate of ``ca``, if one is given."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if ca is not None:
            ca.issue_cert("prometheus").configure_cert(context)
        return context


@pytest.fixture(name="files")
def tls_files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.slow
def test_tls_is_served_beside_clients_that_never_shake_hands(files: Files) -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        assert server.url.startswith("https://")
        async with connections(server, MAX_CLIENTS + 8):
            assert (await ask("/metrics", tls=files.client()))[0] == 200
        await say(server, GET)  # no TLS at all
        assert await ask("/healthz", tls=files.client()) == (200, "ok\n")

    serve(what, **files.without_client_ca())


@pytest.mark.slow
def test_clients_need_a_certificate_of_the_authority(files: Files) -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        for stranger in (None, trustme.CA()):
            with pytest.raises((urllib.error.URLError, OSError)):
                await ask("/healthz", tls=files.client(stranger))
        assert await ask("/healthz", tls=files.client(files.ca)) == (200, "ok\n")

    serve(what, **files.section)


@pytest.mark.slow
def test_certificates_are_read_again_when_their_files_change(files: Files) -> None:
    async def what(server: MonitoringServer, ask: Ask) -> None:
        old = files.client()
        assert (await ask("/healthz", tls=old))[0] == 200
        files.renew()
        assert (await ask("/healthz", tls=files.client()))[0] == 200
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            await ask("/healthz", tls=old)
        files.tear()
        with capture_logs() as logs:
            for _ in range(2):
                assert (await ask("/healthz", tls=files.client()))[0] == 200, "the one before"
        said = [line["reason"] for line in logs if line["event"] == "metrics_files_not_reloaded"]
        assert len(said) == 1
        assert "what was read before stays in force" in said[0]

    serve(what, **files.without_client_ca())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cert_file", None, "cannot be read: No such file"),
        ("cert_file", "no certificate", "are no certificate (PEM"),
        ("key_file", "no key", "are no certificate (PEM"),
        ("client_ca_file", "no authority", "has no certificate in PEM"),
    ],
)
def test_bad_files_are_refused_before_anything_starts(
    files: Files, name: str, content: str | None, said: str
) -> None:
    path = Path(files.section[name])
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        serve(lambda *_: asyncio.sleep(0), **files.section)
    assert f"metrics.{name} = {str(path)!r}" in str(caught.value)
    assert said in str(caught.value)


def test_the_key_must_be_that_of_the_certificate_and_open(files: Files, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes()
    encrypted = (
        b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
        b"DEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\nAAAA\n"
        b"-----END RSA PRIVATE KEY-----\n"
    )
    for key in (other, encrypted):
        Path(files.section["key_file"]).write_bytes(key)
        with pytest.raises(ConfigError, match=r"are no certificate .* unencrypted key"):
            serve(lambda *_: asyncio.sleep(0), **files.section)


# --- users --------------------------------------------------------------------------------------


def test_metrics_are_for_users_and_health_is_for_everybody(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"# who may look\n\nalice:{HASH}\n")

    async def what(server: MonitoringServer, ask: Ask) -> None:
        assert await ask("/healthz") == (200, "ok\n")
        assert await ask("/readyz") == (503, "not ready\n"), "nothing of the job is told"
        assert await ask("/readyz", f"alice:{PASSWORD}") == (503, "generation 3 is broken\n")
        for wrong in (None, "alice:", f"bob:{PASSWORD}", "alice:nine", f"alice:{'x' * 99}", ":"):
            assert (await ask("/metrics", wrong))[0] == 401
        for _ in range(2):  # the second one is not hashed again
            status, text = await ask("/metrics", f"alice:{PASSWORD}")
            assert status == 200
            assert "rallypoint_generation" in text
        refused = await say(server, b"GET /metrics HTTP/1.1\r\nAuthorization: Basic %%\r\n\r\n")
        assert b"401 Unauthorized" in refused
        assert b"WWW-Authenticate: Basic" in refused
        users.write_text(f"bob:{HASH}\n")
        assert (await ask("/metrics", f"alice:{PASSWORD}"))[0] == 401, "removed from the file"
        assert (await ask("/metrics", f"bob:{PASSWORD}"))[0] == 200

    serve(what, users_file=str(users), reasons=("generation 3 is broken",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no user; add one with `htpasswd -B"),
        ("# nobody\n", "has no user"),
        (f"a:{HASH}\nb:{PASSWORD}\n", "line 2: expected NAME:HASH with a bcrypt hash"),
        (f"a:{HASH}\na:{HASH}\n", "line 2: the name 'a' stands there twice"),
        (f"a:{HASH.replace('$04$', '$31$')}\n", "line 1: the cost of the hash is 31"),
    ],
    ids=["gone", "empty", "comment", "no hash", "twice", "cost"],  # a hash differs in each process
)
def test_a_bad_users_file_is_refused_and_no_password_is_shown(
    tmp_path: Path, text: str | None, said: str
) -> None:
    users = tmp_path / "users"
    if text is not None:
        users.write_text(text)
    with pytest.raises(ConfigError) as caught:
        serve(lambda *_: asyncio.sleep(0), users_file=str(users))
    assert said in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.slow
def test_passwords_that_wait_to_be_hashed_do_not_pile_up(tmp_path: Path) -> None:
    """Many wrong ones at once: they are refused, and who is known does not wait for them."""
    slow = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(8)).decode()
    users = tmp_path / "users"
    users.write_text(f"alice:{slow}\n")

    async def what(server: MonitoringServer, ask: Ask) -> None:
        assert (await ask("/metrics", f"alice:{PASSWORD}"))[0] == 200
        guesses = [asyncio.ensure_future(ask("/metrics", f"alice:{n}")) for n in range(24)]
        assert (await ask("/metrics", f"alice:{PASSWORD}"))[0] == 200
        assert {status for status, _ in await asyncio.gather(*guesses)} == {401}

    serve(what, users_file=str(users))
