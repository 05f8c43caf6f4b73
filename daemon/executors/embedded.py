"""The membership store in this process's memory: one machine, no server; the default."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

from rallypoint.daemon.errors import StoreUnavailableError
from rallypoint.daemon.executors.keyspace import Keyspace
from rallypoint.daemon.executors.store import KeyValue, Lease, Listing, Swapped, WatchEvent


class EmbeddedStore:
    """`MembershipStore` in memory. ``clock`` gives monotonic seconds; it ends leases.

    A lease that has run out ends at the next request, or by itself while somebody watches. The last
    ``history`` changes can be watched from; older ones are compacted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, history: int = 1024) -> None:
        self._clock = clock
        self._keyspace = Keyspace(history=history)
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        return self._enter().get(key)

    async def list(self, prefix: str, *, end: str = "") -> Listing:
        return self._enter().list(prefix, end=end)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        revision = self._enter().put(key, value, lease)
        self._wake()
        return revision

    async def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        swapped = self._enter().compare_and_swap(puts, compare, lease)
        self._wake()
        return swapped

    async def delete(self, key: str) -> bool:
        existed = self._enter().delete(key)
        self._wake()
        return existed

    async def grant(self, ttl_s: float) -> Lease:
        lease = self._enter().grant(ttl_s, self._clock())
        self._wake()
        return lease

    async def keepalive(self, lease: Lease) -> Lease:
        return self._enter().keepalive(lease, self._clock())

    async def revoke(self, lease: Lease) -> None:
        self._enter().revoke(lease)
        self._wake()

    async def watch(
        self, prefix: str, from_revision: int, *, end: str = ""
    ) -> AsyncIterator[WatchEvent]:
        from_revision = max(1, from_revision)
        while not self._closed:
            self._expire()
            changed, revision = self._changed, self._keyspace.revision
            for event in self._keyspace.changes(prefix, from_revision, end=end):
                yield event
            from_revision = max(from_revision, revision + 1)
            await self._sleep_until_change(changed)

    async def close(self) -> None:
        self._closed = True
        self._wake()

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including ``revision``: they cannot be watched any more."""
        self._keyspace.compact(revision)

    # --- inside ------------------------------------------------------------------------------

    def _enter(self) -> Keyspace:
        if self._closed:
            raise StoreUnavailableError("the embedded membership store is closed")
        self._expire()
        return self._keyspace

    def _expire(self) -> None:
        before = self._keyspace.revision
        self._keyspace.expire(self._clock())
        if self._keyspace.revision != before:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _sleep_until_change(self, changed: asyncio.Event) -> None:
        """Until something is written, or the next lease runs out."""
        deadline_s = self._keyspace.next_expiry_s
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return
