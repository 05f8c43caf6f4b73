"""The lease of a node: taken, renewed about once a second, replaced when it is lost."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from rallypoint.daemon.core.events import LeaseKept
from rallypoint.daemon.errors import LeaseExpiredError, StoreError
from rallypoint.daemon.executors.patience import Patience
from rallypoint.daemon.executors.store import Lease, MembershipStore

_KEEPALIVE_S: Final = 1.0

_log = structlog.get_logger(__name__)


class LeaseKeeper:
    """A lease of ``detect_s``. ``emit`` is told whenever the store has confirmed it; ``lost`` is called
    when it was found to be over, ``replaced`` when there is another one."""

    def __init__(
        self,
        store: MembershipStore,
        node: str,
        detect_s: float,
        patience: Patience,
        emit: Callable[[LeaseKept], None],
        *,
        lost: Callable[[], None],
        replaced: Callable[[], None],
    ) -> None:
        self._store = store
        self._node = node
        self._detect_s = detect_s
        self._patience = patience
        self._emit = emit
        self._lost = lost
        self._replaced = replaced
        self._renewing = asyncio.Lock()
        self.newest: Lease | None = None

    async def take(self) -> Lease:
        """A new lease."""
        lease = await self._store.grant(self._detect_s)
        self._hold(lease)
        return lease

    async def keep(self) -> None:
        """Renew it, without end."""
        while True:
            await asyncio.sleep(min(_KEEPALIVE_S, self._detect_s / 3))
            await self._patience.until_done("lease", self._keep_once)

    async def replace(self, lost: Lease) -> None:
        """Take another one, once, whoever noticed first that ``lost`` is over."""
        async with self._renewing:
            if self.require().id != lost.id:
                return
            _log.warning("lease_lost", reason=f"lease {lost.id} is over; taking a new one")
            self._lost()
            await self.take()
            self._replaced()

    async def give_back(self) -> None:
        """End it, and with it our keys, at once."""
        if self.newest is None:
            return
        try:
            await self._store.revoke(self.newest)
        except StoreError as error:
            _log.warning("lease_not_revoked", reason=f"{error}; it runs out by itself")

    def require(self) -> Lease:
        """The newest one. Raises `StoreError` before `take`."""
        if self.newest is None:
            raise StoreError(f"node {self._node} has not joined the membership store yet")
        return self.newest

    async def _keep_once(self) -> None:
        lease = self.require()
        try:
            renewed = await self._store.keepalive(lease)
        except LeaseExpiredError:
            await self.replace(lease)
        else:
            if self.require().id == lease.id:
                self._hold(renewed)

    def _hold(self, lease: Lease) -> None:
        self.newest = lease
        self._emit(LeaseKept(lease.deadline_s))
