"""The sockets of this process: which a process group opened, and how to shut them from outside."""

import contextlib
import os
import socket


def open_sockets() -> dict[int, str]:
    """Sockets of this process, descriptor -> identity."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def shut(fd: int, identity: str) -> bool:
    """Shut a connected internet socket if the descriptor still is that socket."""
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != identity:
            return False
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # closed, or already shut, in the meantime: what we wanted
    return True
