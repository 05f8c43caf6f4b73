"""Checks of addresses: the interface of collectives, what is bound, what others are told, ports."""

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.daemon.executors import httpaccess
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.doctor.finding import Finding, Patient, graded

_SLOW_S: Final = 1.0
_CONNECT_S: Final = 3.0


def interface(patient: Patient) -> Iterator[Finding]:
    """``node.interface`` is there and up."""
    name = patient.config.node.interface
    there = sorted(known for _, known in socket.if_nameindex())
    if name not in there:
        text = f"node.interface = {name!r} is not there; there are {', '.join(there)}"
        yield graded("interface", text, fail=True, remedy="set node.interface to one of them")
        return
    flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
    yield graded(
        "interface",
        f"node.interface = {name!r} is {'up' if flags & 1 else 'down'}",
        fail=not flags & 1,
        remedy=f"ip link set {name} up",
    )


def addresses(patient: Patient) -> Iterator[Finding]:
    """``node.bind`` can be bound, and ``node.advertise`` leads there."""
    node = patient.config.node
    try:
        listener = socket.create_server((node.bind, 0), family=_family(node.bind))
    except OSError as error:
        text = f"node.bind = {node.bind!r}: {error.strerror or error}"
        yield graded("addresses", text, fail=True, remedy="give an address of this machine")
        return
    with listener:
        port = listener.getsockname()[1]
        begun_s = time.monotonic()
        why = _reach(node.advertise, port)
        took_s = time.monotonic() - begun_s
    shown = f"node.advertise = {node.advertise!r}"
    yield graded(
        "addresses",
        f"{shown}: {why}"
        if why
        else f"{shown} leads to node.bind = {node.bind!r} ({took_s:.3f} s)",
        fail=bool(why),
        warn=took_s > _SLOW_S,
        remedy="give an address under which other nodes reach node.bind; a slow one is a slow name server",
    )


def ports(patient: Patient) -> Iterator[Finding]:
    """``metrics.port`` is free, or this run's own."""
    section = patient.config.metrics
    where = f"metrics.bind:port = {section.bind}:{section.port}"
    if patient.runs:
        yield graded("ports", f"{where}: the supervisor of {patient.directory} runs and has it")
        return
    try:
        with socket.create_server((section.bind, section.port), family=_family(section.bind)):
            yield graded("ports", f"{where} is free")
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        text = f"{where}: {'in use' if taken else error.strerror or error}"
        remedy = "give another metrics.port (0 picks a free one), or another metrics.bind"
        yield graded("ports", text, fail=True, remedy=remedy)


def metrics(patient: Patient) -> Iterator[Finding]:
    """Certificate and users of /metrics can be used; it is not open to other machines."""
    section = patient.config.metrics
    try:
        encrypted = httpaccess.server_context(section) is not None
        if section.users_file is not None:
            httpaccess.read_users(section.users_file)
    except ConfigError as error:
        remedy = "mend the file: a run would be refused (exit code 2)"
        yield graded("metrics", str(error), fail=True, remedy=remedy)
        return
    guarded = section.users_file is not None or section.client_ca_file is not None
    alone = section.bind in ("localhost", "::1") or section.bind.startswith("127.")
    yield graded(
        "metrics",
        f"/metrics on {section.bind}: {'TLS' if encrypted else 'not encrypted'}, "
        f"{'for those who are let in' if guarded else 'for everybody'}"
        f"{' on this machine' if alone else ''}",
        warn=not alone and not (encrypted and guarded),
        remedy="metrics.cert_file, key_file and users_file, or metrics.bind on loopback",
    )


def _reach(host: str, port: int) -> str:
    """Why nobody gets through to this port; "" when one does."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return f"a connection to port {port} there fails: {error.strerror or error}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
