"""A client of rank 0's store that can be given up while it connects."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_POLL_S = 0.002
_CONNECT_S = 0.2


def connect(host: str, port: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """A client of the store at ``host:port``, once it answers; ``check`` is called again and again until
    then, and ends the wait with what it raises. Raises what `TCPStore` does: `DistError`, `RuntimeError`.
    """
    while True:
        check()
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            break
        except OSError:
            time.sleep(_POLL_S)
    opened: Future[TCPStore] = Future()

    def open_() -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            opened.set_result(
                TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            )
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            opened.set_exception(error)

    # Beside us, since the client cannot be interrupted: the port of a process that is dying may still be
    # open, and nobody answers.
    threading.Thread(target=open_, name="store-client", daemon=True).start()
    while not wait([opened], _POLL_S).done:
        check()
    return opened.result()
