"""What a node shows to the others of its job, and what it sees of them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from rallypoint.daemon.core.records import MemberRecord
from rallypoint.daemon.errors import StoreError
from rallypoint.daemon.executors.membershipview import Keys, View, decode
from rallypoint.daemon.executors.probe import ask
from rallypoint.daemon.executors.store import MembershipStore
from rallypoint.daemon.shared.errors import ConfigError

ASK_S: Final = 0.5
"""Bound of a question to the store that somebody waits for; and how often a node that drains looks
whether all do."""
FRESH_S: Final = 0.2
"""However often somebody asks, the store is asked no more often than this."""
_BACKLOG: Final = 1024


class Neighbours:
    """The leader follows all records (``view``); the others read them when they need them. ``bind`` is
    the address of a port of this supervisor that says nothing: others ask it whether this process lives.
    None: there are no others."""

    def __init__(
        self,
        store: MembershipStore,
        keys: Keys,
        view: Callable[[], View],
        leads: Callable[[], bool],
        *,
        bind: str | None,
        probe_s: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        self._leads = leads
        self._bind = bind
        self._probe_s = probe_s
        self._socket: socket.socket | None = None
        self._changed = asyncio.Event()
        self._listed = View(self._keys)
        self._read: tuple[MemberRecord, ...] = ()
        """The records of all other nodes, as they were read last."""
        self._fresh_until_s = 0.0
        self.port = 0
        """The port; 0 while none is open."""

    async def open(self) -> None:
        """Listen on a free port. Raises `ConfigError` when that cannot be."""
        if self._bind is None or self._socket is not None:
            return
        family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
        try:
            self._socket = socket.create_server((self._bind, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"node.bind = {self._bind!r}: cannot listen there: {error.strerror}; give an address of "
                "this node"
            ) from error
        self.port = self._socket.getsockname()[1]
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._hang_up, self._socket)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _hang_up(self, listening: socket.socket) -> None:
        """Close whatever has connected. When a worker is lost, every node asks the leader at once: with a
        transport for each, a thousand of them would hold its decisions up."""
        with contextlib.suppress(OSError):  # nobody is left, or who asked has closed first
            while True:
                listening.accept()[0].close()

    def changed(self) -> None:
        """The view has changed."""
        self._changed.set()

    @property
    def alone(self) -> bool:
        """Whether no other node is known to take part."""
        view, node = self._view(), self._keys.node
        if self.records():
            return False
        planned = () if view.plan is None or self._leads() else view.plan.members
        return self.leader in ("", node) and all(m.key.node == node for m in planned)

    @property
    def leader(self) -> str:
        """The node that leads; "" when none does."""
        leader = self._view().leader
        return "" if leader is None else leader.value.decode(errors="replace")

    @property
    def live(self) -> bool:
        """Whether `records` are those of now."""
        return self._leads()

    def records(self) -> tuple[MemberRecord, ...]:
        """The records of all other nodes: the leader's are those of now, others know what `refresh`
        read last."""
        return self._others(self._view().sorted_members()) if self._leads() else self._read

    async def refresh(self) -> tuple[MemberRecord, ...]:
        """The records of all other nodes as they are now, or were `FRESH_S` ago, or, when the store does not
        answer within `ASK_S`, as they were."""
        now = asyncio.get_running_loop().time()
        if not self._leads() and now >= self._fresh_until_s:
            self._fresh_until_s = now + FRESH_S
            try:
                async with asyncio.timeout(ASK_S):
                    listing = await self._store.list(self._keys.members)
            except (StoreError, TimeoutError):
                return self._read
            self._listed = View.of(self._keys, listing, self._listed)
            self._read = self._others(self._listed.sorted_members())
        return self.records()

    async def until_all_drain(self) -> None:
        """Return once every node of the job, this one among them, is on its way out."""
        while True:
            self._changed.clear()
            mine = self._view().members.get(self._keys.node)
            drains = mine is not None and mine.draining
            if drains and all(m.draining for m in await self.refresh()):
                return
            try:
                async with asyncio.timeout(ASK_S if drains else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leader_gone(self) -> int:
        """The revision at which the leader was elected, if its supervisor is gone: its port is closed
        while its host answers. Else 0, also when the store does not answer."""
        leader = self._view().leader
        if leader is None:
            return 0
        try:
            item = await self._store.get(f"{self._keys.members}{self.leader}")
            there = None if item is None else decode(item, MemberRecord)
        except StoreError:
            return 0
        if there is None or not there.port:
            return 0
        gone = await ask((there.advertise, there.port), self._probe_s) == "gone"
        return leader.mod_revision if gone else 0

    def _others(self, members: tuple[MemberRecord, ...]) -> tuple[MemberRecord, ...]:
        return tuple(m for m in members if m.node != self._keys.node)
