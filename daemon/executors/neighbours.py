"""What a node shows to the others of its job, and what it sees of them."""

import asyncio
from collections.abc import Callable

from rallypoint.daemon.core.records import MemberRecord
from rallypoint.daemon.executors.membershipview import View
from rallypoint.daemon.executors.probe import ask
from rallypoint.daemon.shared.errors import ConfigError


class Neighbours:
    """``view`` gives what the store says now. ``bind`` is the address of a port of this supervisor that
    says nothing: others ask it whether this process lives. None: there are no others."""

    def __init__(
        self, node: str, view: Callable[[], View], *, bind: str | None, probe_s: float
    ) -> None:
        self._node = node
        self._view = view
        self._bind = bind
        self._probe_s = probe_s
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()
        self.port = 0
        """The port; 0 while none is open."""

    async def open(self) -> None:
        """Listen on a free port. Raises `ConfigError` when that cannot be."""
        if self._bind is None or self._server is not None:
            return
        try:
            self._server = await asyncio.start_server(lambda _, w: w.close(), self._bind, 0)
        except OSError as error:
            raise ConfigError(
                f"node.bind = {self._bind!r}: cannot listen there: {error.strerror}; give an address of "
                "this node"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def changed(self) -> None:
        """The view has changed."""
        self._changed.set()

    def records(self) -> tuple[MemberRecord, ...]:
        """The records of all other nodes, as of the last change that was seen."""
        return tuple(m for m in self._view().sorted_members() if m.node != self._node)

    async def until_all_drain(self) -> None:
        """Return once every node of the job, this one among them, is on its way out."""
        while not self._all_drain():
            self._changed.clear()
            await self._changed.wait()

    async def leader_gone(self) -> int:
        """The revision at which the leader was elected, if its supervisor is gone: its port is closed
        while its host answers. Else 0."""
        leader = self._view().leader
        there = None if leader is None else self._view().members.get(leader.value.decode())
        if leader is None or there is None or not there.port:
            return 0
        gone = await ask((there.advertise, there.port), self._probe_s) == "gone"
        return leader.mod_revision if gone else 0

    def _all_drain(self) -> bool:
        members = self._view().members
        return self._node in members and all(m.draining for m in members.values())
