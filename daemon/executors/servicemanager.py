"""Talking to systemd over ``$NOTIFY_SOCKET``: ready, alive, what goes on, and more time for a stop.

The protocol is one datagram of ``NAME=value`` lines (sd_notify(3)); a name that begins with ``@`` is
abstract. Without the variable nothing is said.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

import structlog

_EVERY_S: Final = 1.0
_EXTEND_S: Final = 10.0
"""Each word while the node stops gives it this much longer."""
_CLOSE_S: Final = 90.0

_log = structlog.get_logger(__name__)


class ServiceManager:
    """What the supervisor says to whoever started it as a service."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us and for_us else None
        """The service is killed when it is silent for this long; None: it is not watched."""
        self._shown = ""

    async def keep(self, shown: Callable[[], str], stopping: Callable[[], bool]) -> None:
        """Say from the event loop that it is alive, what goes on, and while it is ``stopping`` that
        it needs longer. A loop that hangs says nothing, and the watchdog ends the process."""
        if not self._address:
            return
        self._say("READY=1")
        every_s = min(_EVERY_S, (self.watchdog_s or _EVERY_S) / 3)
        while True:
            lines = ["WATCHDOG=1"] if self.watchdog_s else []
            if (text := shown()) != self._shown:
                self._shown = text
                lines.append(f"STATUS={text}")
            if stopping():
                lines.append(f"EXTEND_TIMEOUT_USEC={int(_EXTEND_S * 1e6)}")
            if lines:
                self._say(*lines)
            await asyncio.sleep(every_s)

    def ending(self, reason: str) -> None:
        """The last word. What is still to do (a goodbye to the store, the reward curve) has its own
        bounds below `_CLOSE_S`."""
        shown = reason.splitlines()[0] if reason else ""
        self._say("STOPPING=1", f"STATUS={shown}", f"EXTEND_TIMEOUT_USEC={int(_CLOSE_S * 1e6)}")

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto("\n".join(lines).encode(), path)
        except OSError as error:  # the run does not depend on who watches it
            _log.warning("service_manager_not_told", address=self._address, reason=str(error))
