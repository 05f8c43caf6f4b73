"""Who may read /metrics: TLS with certificates that are read again when their files change, and users.

A file that cannot be used is refused at the start (`ConfigError`); one that breaks later is logged once,
and what was read before stays in force.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import bcrypt
import structlog

from rallypoint.daemon.shared.config import MetricsSection
from rallypoint.daemon.shared.errors import ConfigError

_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_COSTS: Final = range(4, 15)
_PASSWORD_BYTES: Final = 72
"""bcrypt sees no more of a password."""
_WAITING: Final = 4
"""Passwords that are hashed one after the other; who comes beyond is refused."""
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Watched(Generic[T]):
    """What ``read`` makes of some files; made anew when one of them has changed."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        self._paths, self._read = paths, read
        self._seen = self._stamps()
        self._value = read()

    def get(self) -> T:
        """The newest that could be read."""
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen, names = stamps, [str(path) for path in self._paths]
            try:
                self._value = self._read()
                _log.info("metrics_files_reloaded", paths=names)
            except ConfigError as error:
                reason = f"{error}; what was read before stays in force"
                _log.error("metrics_files_not_reloaded", paths=names, reason=reason)
        return self._value

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def server_context(section: MetricsSection) -> Watched[ssl.SSLContext] | None:
    """TLS of the server, if there is any. Raises `ConfigError` for files that cannot be used."""
    if section.cert_file is None or section.key_file is None:
        return None
    names = (section.cert_file, section.key_file, section.client_ca_file)
    paths = tuple(Path(name) for name in names if name is not None)
    return Watched(paths, lambda: _context(*names))


def _context(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name, path in (("cert_file", cert), ("key_file", key), ("client_ca_file", client_ca)):
        if path is not None:
            _read(name, path)
    try:
        context.load_cert_chain(str(cert), key, password=_refuse_password)
    except (ssl.SSLError, _EncryptedKeyError) as error:
        raise ConfigError(
            f"metrics.cert_file = {cert!r} and metrics.key_file = {key!r} are no certificate (PEM, the "
            f"server's own first) with its unencrypted key: {error}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"metrics.client_ca_file = {client_ca!r} has no certificate in PEM: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _EncryptedKeyError(Exception):
    pass


def _refuse_password() -> str:
    """OpenSSL would ask on the terminal."""
    raise _EncryptedKeyError("the key is encrypted")


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"metrics.{name} = {path!r} cannot be read: {why}") from error


class Users:
    """Names and bcrypt hashes of ``metrics.users_file``, as ``htpasswd -B`` writes them."""

    def __init__(self, path: str) -> None:
        self._hashes = Watched((Path(path),), lambda: read_users(path))
        self._secret = secrets.token_bytes(32)
        self._known: dict[bytes, dict[str, str]] = {}
        """Keyed digests of what was right before, and the users that it was compared with: a scrape every
        few seconds does not pay for a slow hash again."""
        self._hashing = asyncio.Semaphore(1)
        self._waiting = 0

    async def allows(self, header: str | None) -> bool:
        """Whether an ``Authorization`` header is right. All comparisons take constant time, and one for
        a name that is not known takes as long as one for a name that is."""
        hashes = self._hashes.get()
        name, _, password = _credentials(header).partition(b":")
        if not name or len(password) > _PASSWORD_BYTES or b"\0" in password:
            return False
        digest = hmac.digest(self._secret, name + b":" + password, hashlib.sha256)
        if any(hmac.compare_digest(digest, known) for known in self._known):
            if self._known[digest] is hashes:
                return True
            del self._known[digest]
        if self._waiting >= _WAITING:
            return False
        hashed = hashes.get(name.decode(errors="replace"))
        stored = next(iter(hashes.values())) if hashed is None else hashed
        self._waiting += 1
        try:
            async with self._hashing:
                right = await asyncio.to_thread(bcrypt.checkpw, password, stored.encode())
        finally:
            self._waiting -= 1
        if right and hashed is not None:
            self._known = {**self._known, digest: hashes}
        return right and hashed is not None


def _credentials(header: str | None) -> bytes:
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return b""


def read_users(path: str) -> dict[str, str]:
    """Hashes by name. Raises `ConfigError`, which names the line, but never what stands in it."""
    users: dict[str, str] = {}
    for number, line in enumerate(_read("users_file", path).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"metrics.users_file = {path!r}, line {number}"
        name, _, hashed = line.strip().partition(":")
        match = _HASH.fullmatch(hashed)
        if not name or match is None:
            raise ConfigError(
                f"{where}: expected NAME:HASH with a bcrypt hash; make one with `htpasswd -nB NAME`"
            )
        if int(match[1]) not in _COSTS:
            raise ConfigError(
                f"{where}: the cost of the hash is {int(match[1])}, and must be from {_COSTS[0]} to "
                f"{_COSTS[-1]}; make one with `htpasswd -nBC 10 NAME`"
            )
        if name in users:
            raise ConfigError(f"{where}: the name {name!r} stands there twice")
        users[name] = hashed
    if not users:
        raise ConfigError(
            f"metrics.users_file = {path!r} has no user; add one with `htpasswd -B {path} NAME`"
        )
    return users
