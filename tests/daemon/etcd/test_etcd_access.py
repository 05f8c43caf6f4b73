"""Who is let in by etcd: users, tokens, TLS, addresses. Against real servers."""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from rallypoint.daemon.errors import StorePermissionError, StoreUnavailableError
from rallypoint.daemon.etcd.connection import Access
from rallypoint.daemon.etcd.store import EtcdStore
from rallypoint.daemon.executors.store import Put
from rallypoint.daemon.shared.errors import ConfigError
from tests.fakes.etcd_server import EtcdCluster, cluster

pytestmark = pytest.mark.slow

TOKEN_TTL_S = 1


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await scenario

    asyncio.run(bounded())


def add_users(servers: EtcdCluster) -> None:
    """User ``trainer`` may read and write /job/, by password or certificate."""
    for command in (
        "user add root:root-password",
        "role add root",
        "user grant-role root root",
        "role add job",
        "role grant-permission --prefix=true job readwrite /job/",
        "user add trainer:first-password",
        "user grant-role trainer job",
        "auth enable",
    ):
        servers.ctl(*command.split())


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[EtcdCluster, Access]]:
    """A server with users and short-lived tokens, and the access of user ``trainer``."""
    password = tmp_path / "password"
    password.write_text("first-password\n")
    with cluster(tmp_path, options=("--auth-token-ttl", str(TOKEN_TTL_S))) as servers:
        add_users(servers)
        yield servers, replace(servers.access, user="trainer", password_file=password)


def test_a_token_that_expired_is_renewed(guarded: tuple[EtcdCluster, Access]) -> None:
    _, access = guarded

    async def scenario() -> None:
        store = EtcdStore(access, detect_s=5.0)
        revision = await store.put("/job/a", b"1")
        token = store._connection._token
        watch = store.watch("/job/", revision + 1)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(2 * TOKEN_TTL_S + 1)  # idle: only calls keep a token alive
        late = store.watch("/job/", revision)  # made with the old token, which etcd calls forbidden
        assert isinstance(await anext(late), Put)
        await store.put("/job/a", b"2")
        event = await waiting
        assert isinstance(event, Put)
        assert event.item.value == b"2"
        assert store._connection._token != token, "the first token was still good: nothing shown"
        await store.close()

    run(scenario())


def test_a_changed_password_is_read_anew(guarded: tuple[EtcdCluster, Access]) -> None:
    servers, access = guarded

    async def scenario() -> None:
        store = EtcdStore(access, detect_s=5.0)
        await store.put("/job/a", b"1")
        assert access.password_file is not None
        access.password_file.write_text("second-password\n")
        servers.ctl("user", "delete", "trainer", "--user=root:root-password")
        servers.ctl("user", "add", "trainer:second-password", "--user=root:root-password")
        servers.ctl("user", "grant-role", "trainer", "job", "--user=root:root-password")
        await store.put("/job/a", b"2")
        await store.close()

    run(scenario())


def test_what_is_forbidden_is_said(guarded: tuple[EtcdCluster, Access]) -> None:
    servers, access = guarded

    async def scenario() -> None:
        store = EtcdStore(access, detect_s=5.0)
        with pytest.raises(StorePermissionError, match="permission denied"):
            await store.put("/other", b"1")
        with pytest.raises(StorePermissionError, match="permission denied"):
            await anext(store.watch("/other", 1))
        await store.close()
        nobody = EtcdStore(servers.access, detect_s=5.0)
        with pytest.raises(StorePermissionError, match=r"membership\.user"):
            await nobody.put("/job/a", b"1")
        await nobody.close()
        assert access.password_file is not None
        access.password_file.write_text("wrong")
        wrong = EtcdStore(access, detect_s=5.0)
        with pytest.raises(StorePermissionError, match="authentication failed") as caught:
            await wrong.get("/job/a")
        assert "wrong" not in str(caught.value)
        await wrong.close()

    run(scenario())


def test_a_password_file_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    access = Access(("127.0.0.1:1",), user="trainer", password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="none: cannot be read: No such file"):
        EtcdStore(access, detect_s=5.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server and a client with the common name ``trainer``; another authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    trustme.CA().cert_pem.write_to_path(folder / "other.crt")
    server = authority.issue_cert("127.0.0.1", "localhost")
    client = authority.issue_cert("trainer.example", common_name="trainer")
    for name, issued in (("server", server), ("client", client)):
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
    return folder


@pytest.fixture
def encrypted(tmp_path: Path, certificates: Path) -> Iterator[tuple[EtcdCluster, Access]]:
    """A server that wants client certificates, and an access that has one."""
    ca, cert, key = (certificates / name for name in ("ca.crt", "client.crt", "client.key"))
    options = (
        *("--cert-file", str(certificates / "server.crt")),
        *("--key-file", str(certificates / "server.key")),
        *("--client-cert-auth", "--trusted-ca-file", str(ca)),
    )
    ctl = (f"--cacert={ca}", f"--cert={cert}", f"--key={key}")
    with cluster(tmp_path, options=options, ctl_options=ctl) as servers:
        yield servers, replace(servers.access, ca_file=ca, cert_file=cert, key_file=key)


def test_tls_with_a_client_certificate(encrypted: tuple[EtcdCluster, Access]) -> None:
    _, access = encrypted

    async def scenario() -> None:
        store = EtcdStore(access, detect_s=5.0)
        revision = await store.put("/job/a", b"1")
        assert isinstance(await anext(store.watch("/job/", revision)), Put)
        await store.close()
        by_name = replace(
            access, endpoints=(access.endpoints[0].replace("127.0.0.1", "localhost"),)
        )
        store = EtcdStore(by_name, detect_s=5.0)
        assert await store.get("/job/a") is not None
        await store.close()

    run(scenario())


def test_the_name_in_the_certificate_is_the_user(encrypted: tuple[EtcdCluster, Access]) -> None:
    servers, access = encrypted
    add_users(servers)

    async def scenario() -> None:
        store = EtcdStore(access, detect_s=5.0)
        await store.put("/job/a", b"1")
        with pytest.raises(StorePermissionError, match="permission denied"):
            await store.put("/other", b"1")
        await store.close()

    run(scenario())


def test_tls_that_does_not_match_is_said(
    encrypted: tuple[EtcdCluster, Access], certificates: Path
) -> None:
    servers, access = encrypted

    async def scenario() -> None:
        for wrong in (
            replace(access, ca_file=certificates / "other.crt"),
            replace(access, cert_file=None, key_file=None),
            servers.access,
        ):
            store = EtcdStore(wrong, detect_s=1.0)
            with pytest.raises(StoreUnavailableError, match="no answer within 1 s"):
                await store.get("/job/a")
            await store.close()

    run(scenario())


def test_files_that_are_no_certificates_are_refused_at_once(
    certificates: Path, tmp_path: Path
) -> None:
    """grpc would say of each connection that it failed, for ever."""
    ca, cert, key = (certificates / name for name in ("ca.crt", "client.crt", "client.key"))
    text = tmp_path / "no.pem"
    text.write_text("[job]\n")
    right = Access(("127.0.0.1:1",), ca_file=ca, cert_file=cert, key_file=key)
    for wrong, words in (
        (replace(right, ca_file=text), "no.pem: no PEM certificate"),
        (replace(right, cert_file=text), "no PEM certificate and its key"),
        (replace(right, key_file=certificates / "server.key"), "KEY_VALUES_MISMATCH"),
    ):
        with pytest.raises(ConfigError, match=words):
            EtcdStore(wrong, detect_s=5.0)
    asyncio.run(EtcdStore(right, detect_s=5.0).close())


def test_an_ipv6_endpoint(tmp_path: Path) -> None:
    async def scenario(servers: EtcdCluster) -> None:
        assert servers.endpoints[0].startswith("[::1]:")
        store = EtcdStore(servers.access, detect_s=5.0)
        revision = await store.put("/job/a", b"1")
        assert isinstance(await anext(store.watch("/job/", revision)), Put)
        await store.close()

    with cluster(tmp_path, host="[::1]") as servers:
        run(scenario(servers))
