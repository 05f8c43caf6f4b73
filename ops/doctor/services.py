"""Checks of what the job needs of others: etcd, and the place of its checkpoints."""

import asyncio
import http.client
import ssl
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.probe import refuses_second_create
from rallypoint.checkpointing.storage import LocalStorage
from rallypoint.daemon.errors import StoreError, StoreQuotaError
from rallypoint.daemon.executors.openstore import open_store
from rallypoint.daemon.shared.config import MembershipSection
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops.doctor.finding import Finding, Patient, graded

_READS: Final = 10
_ANSWER_S: Final = 3.0
_DAY_S: Final = 86400.0
_EXPIRES_DAYS: Final = 14.0
_FULL: Final = 0.8
_PAYLOAD: Final = b"rallypoint doctor"


def etcd(patient: Patient) -> Iterator[Finding]:
    """Every endpoint answers and is quick; this user may write where the job does; TLS; the quota."""
    section = patient.config.membership
    if section.backend == "embedded":
        yield graded("etcd", 'membership.backend = "embedded": no etcd is needed')
        return
    for endpoint in section.endpoints:
        yield _endpoint(replace(section, endpoints=(endpoint,)))
        yield from _transport(section, endpoint)
    job, node = patient.config.job.name, patient.config.node.name
    yield asyncio.run(_write(section, f"/rallypoint/{job}/doctor/{node}"))


def _endpoint(section: MembershipSection) -> Finding:
    name, bound_s = section.endpoints[0], section.detect_s / 3
    remedy = "is it running, and reachable from here? Look at `etcdctl endpoint health`"
    try:
        seconds = asyncio.run(_read(section))
    except (StoreError, ConfigError) as error:
        return graded("etcd", f"{name}: {error}", fail=True, remedy=remedy)
    slowest_s = max(seconds)
    return graded(
        "etcd",
        f"{name}: {_READS} reads in {1000 * statistics.median(seconds):.1f} ms (median), "
        f"{1000 * slowest_s:.1f} ms (slowest)",
        fail=slowest_s > bound_s,
        warn=slowest_s > bound_s / 3,
        remedy=f"a try has {bound_s:.2g} s (membership.detect_s / 3): give etcd a disk of its own, or raise it",
    )


async def _read(section: MembershipSection) -> list[float]:
    store = open_store(section, lambda *call: None)
    try:
        seconds = []
        for _ in range(_READS):
            begun_s = time.monotonic()
            await store.get("/rallypoint/doctor")
            seconds.append(time.monotonic() - begun_s)
        return seconds
    finally:
        await store.close()


async def _write(section: MembershipSection, key: str) -> Finding:
    """A key under a lease, as a node's own record is, and gone again."""
    store = open_store(section, lambda *call: None)
    try:
        lease = await store.grant(section.detect_s)
        await store.put(key, _PAYLOAD, lease)
        await store.revoke(lease)
    except StoreQuotaError as error:
        remedy = "compact, defragment, `etcdctl alarm disarm`, and switch on automatic compaction"
        return graded("etcd", str(error), fail=True, remedy=remedy)
    except StoreError as error:
        remedy = "grant this user the prefix /rallypoint/<job>/ (readwrite), and see that most members run"
        return graded("etcd", f"{key} cannot be written: {error}", fail=True, remedy=remedy)
    finally:
        await store.close()
    return graded("etcd", f"{key} was written under a lease, and removed")


def _transport(section: MembershipSection, endpoint: str) -> Iterator[Finding]:
    """Encryption, the certificate's life, and how full the store is, where the member says it."""
    address = urlsplit(f"//{endpoint}")
    host, port = address.hostname or "", address.port or 2379
    if section.ca_file is None:
        local = host in ("localhost", "::1") or host.startswith("127.")
        yield graded(
            "etcd",
            f"{endpoint}: not encrypted{', on this machine only' if local else ''}",
            warn=not local,
            remedy="membership.ca_file, cert_file and key_file; see the security notes of etcd",
        )
    try:
        answer, days = _ask_metrics(section, host, port)
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = f"{endpoint}: how full it is cannot be read ({error})"
        yield graded("etcd", text)
        return
    if days is not None:
        yield graded(
            "etcd",
            f"{endpoint}: its certificate is good for {days:.0f} days",
            fail=days < 0,
            warn=days < _EXPIRES_DAYS,
            remedy="renew it before it expires: every node loses its lease then",
        )
    size = answer.get("etcd_mvcc_db_total_size_in_bytes")
    quota = answer.get("etcd_server_quota_backend_bytes")
    if size is not None and quota:
        yield graded(
            "etcd",
            f"{endpoint}: {size / 2**20:.0f} MiB of its quota of {quota / 2**20:.0f} MiB are used",
            warn=size > _FULL * quota,
            remedy="--auto-compaction-retention=1h, then defragment: a full store lets nobody join",
        )


def _ask_metrics(
    section: MembershipSection, host: str, port: int
) -> tuple[dict[str, float], float | None]:
    """The member's own /metrics, and days until its certificate expires (None: no TLS)."""
    if section.ca_file is None:
        plain = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
        try:
            return _get(plain), None
        finally:
            plain.close()
    context = ssl.create_default_context(cafile=section.ca_file)
    if section.cert_file is not None:
        context.load_cert_chain(section.cert_file, section.key_file)
    secure = http.client.HTTPSConnection(host, port, timeout=_ANSWER_S, context=context)
    try:
        secure.connect()
        certificate = secure.sock.getpeercert() or {}
        until_s = ssl.cert_time_to_seconds(str(certificate.get("notAfter")))
        return _get(secure), (until_s - time.time()) / _DAY_S
    finally:
        secure.close()


def _get(connection: http.client.HTTPConnection) -> dict[str, float]:
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode(errors="replace")
    pairs = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}


def checkpoints(patient: Patient) -> Iterator[Finding]:
    """A file can be made where checkpoints go, by one writer only, read back, and removed."""
    url = patient.config.checkpoint.url
    place = str(RunDir(patient.directory).path / "checkpoints") if url is None else url
    remedy = "look at permissions and room there, or give another checkpoint.url"
    try:
        storage = open_storage(place, patient.config.checkpoint.credentials_file)
    except ConfigError as error:
        yield graded("checkpoints", str(error), fail=True, remedy="give another checkpoint.url")
        return
    ours = _missing(Path(storage.root)) if isinstance(storage, LocalStorage) else ()
    begun_s = time.monotonic()
    try:
        wrong = refuses_second_create(storage)
        for made in ours:
            made.rmdir()
    except OSError as error:
        text = f"{place}: {type(error).__name__}: {error.strerror or error}"
        yield graded("checkpoints", text, fail=True, remedy=remedy)
        return
    took_s = time.monotonic() - begun_s
    yield graded(
        "checkpoints",
        f"{wrong or f'{place}: written once, read back, removed'} ({took_s:.3f} s)",
        warn=bool(wrong),
        remedy="checkpoints are kept apart by their names alone there; a store that refuses to create what "
        "exists keeps two writers apart in any case",
    )


def _missing(place: Path) -> tuple[Path, ...]:
    """This directory and those above it that are not there, the innermost first."""
    return tuple(path for path in (place, *place.parents) if not path.exists())
