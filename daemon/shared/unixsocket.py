"""Unix sockets whose path may be longer than the 107 bytes that an address can hold.

A long path is reached through ``/proc/self/fd/<directory>``: both sides name the same file, and
nothing has to be put into, or cleaned out of, a shared temporary directory.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MAX_ADDRESS_BYTES: Final = 107


@contextmanager
def _address(path: Path) -> Iterator[str]:
    absolute = os.path.abspath(path)
    if len(os.fsencode(absolute)) <= MAX_ADDRESS_BYTES:
        yield absolute
        return
    directory = os.open(os.path.dirname(absolute), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(absolute)}"
    finally:
        os.close(directory)


def listen(path: Path, backlog: int = 64) -> socket.socket:
    """A listening stream socket at ``path``, readable and writable by its owner only. A file that
    a dead server left there is replaced: the caller must hold the lock of the directory."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            with _address(path) as address:
                server.bind(address)
        finally:
            os.umask(mask)
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def connect(path: Path, timeout_s: float | None = None) -> socket.socket:
    """A stream socket connected to the server at ``path``. Raises OSError when none answers."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _address(path) as address:
            client.connect(address)
    except OSError:
        client.close()
        raise
    return client
