"""Log lines as entries of systemd's journal, with fields of their own.

The native protocol of systemd-journald (systemd.io, "Native Journal Protocol"): one datagram to a socket
holds one entry, ``NAME=value`` lines, or for values with line breaks the name, a 64-bit length and the
bytes; what is too large for a datagram is passed as a sealed memory file.
"""

import array
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Final, TextIO

SOCKET: Final = "/run/systemd/journal/socket"
_PATIENCE_S: Final = 0.1
"""A journal that takes nothing for this long loses the line: the event loop does not wait for it."""
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3}


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a stream leads to the journal: systemd says its device and inode (systemd.exec(5))."""
    try:
        file = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return environ.get("JOURNAL_STREAM") == f"{file.st_dev}:{file.st_ino}"


def entry(event: Mapping[str, Any], bound: frozenset[str]) -> dict[str, str]:
    """The fields of an entry for one log line. ``MESSAGE`` leaves out what ``bound`` names: those facts
    are fields, and on every line."""
    name, level = str(event.get("event", "")), str(event.get("level", "info"))
    own = (f"{k}={_text(v)}" for k, v in event.items() if k not in bound and v is not None)
    fields = {
        "MESSAGE": " ".join((name, *own)),
        "PRIORITY": str(_PRIORITIES.get(level, 6)),
        "SYSLOG_IDENTIFIER": "rallypoint",
    }
    facts = ((k, v) for k, v in event.items() if v is not None)
    return fields | {f"RALLYPOINT_{key.upper()}": _text(value) for key, value in facts}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def datagram(fields: Mapping[str, str]) -> bytes:
    """Fields as the protocol has them."""
    parts = []
    for name, text in fields.items():
        value = text.encode(errors="replace")
        if b"\n" in value:
            parts.append(name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n")
        else:
            parts.append(name.encode() + b"=" + value + b"\n")
    return b"".join(parts)


class JournalSocket:
    """Sends entries. One that is lost, with a journal that is away or full, is counted and never waited
    for long; the next entry that gets through says how many there were, as ``RALLYPOINT_LINES_LOST``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lost = 0

    def send(self, fields: Mapping[str, str]) -> None:
        """Send one entry."""
        lost = {"RALLYPOINT_LINES_LOST": str(self._lost)} if self._lost else {}
        try:
            self._send(datagram({**fields, **lost}))
        except OSError:  # timed out, too: the log must not end the run
            self._lost += 1
        else:
            self._lost = 0

    def _send(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.settimeout(_PATIENCE_S)
            try:
                end.sendto(data, self._path)
            except OSError as error:
                if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                    raise
                self._send_file(end, data)

    def _send_file(self, end: socket.socket, data: bytes) -> None:
        descriptor = os.memfd_create("journal-entry", os.MFD_ALLOW_SEALING)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(data)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            end.sendmsg([b""], rights, 0, self._path)
