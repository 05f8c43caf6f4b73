"""The admin socket: commands of an operator, one JSON object a line.

``{"command": "status"}`` answers ``{"status": …}``. ``stop``, ``drain``, ``detach`` and ``notice`` answer
``{"accepted": true}`` at once and ``{"exited": CODE, "reason": …}`` when the supervisor ends; a
request that cannot be taken answers ``{"error": …}``. ``quarantine`` answers ``{"quarantined": [...]}``,
``quarantine_clear`` (with a ``node`` or of this one, a ``slot`` or all) ``{"cleared": [SLOT, ...]}``; ``pause``, ``resume`` and
``scale`` answer ``{"accepted": true}`` once the wish is on its way to the store.
"""

import asyncio
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
import structlog

from rallypoint.daemon.shared import unixsocket

MAX_LINE_BYTES: Final = 65536
IDLE_TIMEOUT_S: Final = 60.0

_log = structlog.get_logger(__name__)


class AdminRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asks."""

    command: Literal[
        "status",
        "stop",
        "drain",
        "detach",
        "notice",
        "pause",
        "resume",
        "scale",
        "quarantine",
        "quarantine_clear",
    ]
    deadline_s: float | None = None
    """For ``drain`` and ``notice``: seconds that this node has left."""
    workers: int = 0
    """For ``scale``: the world size that is wanted."""
    node: str | None = None
    """For ``quarantine_clear``: of another node; None: of this one."""
    slot: int | None = None
    """For ``quarantine_clear``: only this one."""


class AdminHandler(Protocol):
    """What the supervisor does with commands."""

    async def status(self) -> dict[str, Any]:
        """The document of ``rallypoint status --json``."""
        ...

    def request_stop(self, reason: str) -> None: ...

    def request_drain(self, deadline_s: float | None) -> None: ...

    def request_notice(self, source: str, left_s: float, text: str) -> None: ...

    def request_pause(self, *, paused: bool) -> str:
        """Pause the job, or let it go on. Why that cannot be, else ""."""
        ...

    def request_scale(self, workers: int) -> str:
        """Change the world size of the job. Why that cannot be, else ""."""
        ...

    def detach(self) -> None:
        """End the supervisor; workers live on."""
        ...

    async def quarantined(self) -> list[dict[str, Any]]:
        """Slots in quarantine: ``node``, ``slot``, ``cause``, ``failures``, ``reason``, ``seconds_left``."""
        ...

    async def clear_quarantine(self, node: str | None, slot: int | None) -> list[int]:
        """Let one slot of a node, or all (None), start again; which do."""
        ...


class AdminServer:
    """Listens at ``path``."""

    def __init__(self, path: Path, handler: AdminHandler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._waiting: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Raises OSError."""
        self._server = await asyncio.start_unix_server(
            self._serve, sock=unixsocket.listen(self._path), limit=MAX_LINE_BYTES
        )

    async def close(self, code: int, reason: str) -> None:
        """Tell those who wait how it ended, and stop listening."""
        if self._server is not None:
            self._server.close()
        for writer in self._waiting:
            _write(writer, {"exited": code, "reason": reason})
        for writer in list(self._clients):
            writer.close()
        self._path.unlink(missing_ok=True)
        await asyncio.sleep(0)  # one turn of the loop, in which the last lines go out

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            while line := await self._next_line(reader, writer):
                _write(writer, await self._answer(line, writer))
                await writer.drain()
        except (OSError, ValueError) as error:  # gone, idle, or a line over the limit
            _log.info("admin_client_dropped", reason=str(error) or type(error).__name__)
        finally:
            self._clients.discard(writer)
            self._waiting.discard(writer)
            writer.close()

    async def _next_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The next request; who waits for the end may be silent for as long as it takes."""
        if writer in self._waiting:
            return await reader.readline()
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await reader.readline()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> dict[str, Any]:
        try:
            request = msgspec.json.decode(line, type=AdminRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return {"error": f"not a request of this version: {error}"}
        if request.command == "status":
            return {"status": await self._handler.status()}
        if request.command == "quarantine":
            return {"quarantined": await self._handler.quarantined()}
        if request.command == "quarantine_clear":
            return {"cleared": await self._handler.clear_quarantine(request.node, request.slot)}
        if request.command in ("pause", "resume", "scale"):
            refusal = self._wish(request)
            return {"error": refusal} if refusal else {"accepted": True}
        if request.command == "notice" and request.deadline_s is None:
            return {"error": "a notice needs deadline_s, the seconds that are left"}
        self._waiting.add(writer)
        if request.command == "stop":
            self._handler.request_stop("rallypoint stop")
        elif request.command == "detach":
            self._handler.detach()
        elif request.command == "notice" and request.deadline_s is not None:
            text = f"simulated, {request.deadline_s:g} s left"
            self._handler.request_notice("drill", request.deadline_s, text)
        else:
            self._handler.request_drain(request.deadline_s)
        return {"accepted": True}

    def _wish(self, request: AdminRequest) -> str:
        if request.command == "scale":
            return self._handler.request_scale(request.workers)
        return self._handler.request_pause(paused=request.command == "pause")


def _write(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(document) + b"\n")
