"""The membership store in this process's memory: one machine, no server; the default."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from rallypoint.daemon.errors import CompactedError, LeaseExpiredError, StoreUnavailableError
from rallypoint.daemon.executors.store import (
    Deleted,
    KeyValue,
    Lease,
    Listing,
    Put,
    Swapped,
    WatchEvent,
)


class EmbeddedStore:
    """`MembershipStore` in memory. ``clock`` gives monotonic seconds; it ends leases.

    A lease that has run out ends at the next request, or by itself while somebody watches. The last
    ``history`` changes can be watched from; older ones are compacted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, history: int = 1024) -> None:
        self._clock = clock
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0
        self._revision = 0
        self._events: deque[WatchEvent] = deque()
        self._history = history
        self._oldest = 1
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        self._enter()
        return self._keys.get(key)

    async def list(self, prefix: str) -> Listing:
        self._enter()
        keys = sorted(key for key in self._keys if key.startswith(prefix))
        return Listing(self._revision, tuple(self._keys[key] for key in keys))

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        self._enter()
        self._write({key: value}, self._lease_id(lease))
        return self._revision

    async def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        self._enter()
        succeeded = all(self._mod_revision(key) == wanted for key, wanted in compare.items())
        if succeeded:
            self._write(puts, self._lease_id(lease))
        current = {key: self._keys.get(key) for key in (*compare, *puts)}
        return Swapped(succeeded, self._revision, current)

    async def delete(self, key: str) -> bool:
        self._enter()
        return self._remove([key] if key in self._keys else [])

    async def grant(self, ttl_s: float) -> Lease:
        self._enter()
        self._last_lease += 1
        lease = Lease(self._last_lease, ttl_s, self._clock() + ttl_s)
        self._leases[lease.id] = lease
        self._wake()
        return lease

    async def keepalive(self, lease: Lease) -> Lease:
        self._enter()
        self._lease_id(lease)
        renewed = replace(lease, deadline_s=self._clock() + lease.ttl_s)
        self._leases[lease.id] = renewed
        return renewed

    async def revoke(self, lease: Lease) -> None:
        self._enter()
        self._end_lease(lease.id)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchEvent]:
        from_revision = max(1, from_revision)
        while not self._closed:
            self._expire()
            if from_revision < self._oldest:
                raise CompactedError(prefix, from_revision, self._oldest)
            changed, revision = self._changed, self._revision
            for event in [e for e in self._events if e.mod_revision >= from_revision]:
                key = event.item.key if isinstance(event, Put) else event.key
                if key.startswith(prefix):
                    yield event
            from_revision = max(from_revision, revision + 1)
            await self._sleep_until_change(changed)

    async def close(self) -> None:
        self._closed = True
        self._wake()

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including ``revision``: they cannot be watched any more."""
        while self._events and self._events[0].mod_revision <= revision:
            self._events.popleft()
        self._oldest = max(self._oldest, min(revision, self._revision) + 1)

    # --- inside ------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the embedded membership store is closed")
        self._expire()

    def _expire(self) -> None:
        now = self._clock()
        for lease in [lease for lease in self._leases.values() if lease.deadline_s <= now]:
            self._end_lease(lease.id)

    def _end_lease(self, lease_id: int) -> None:
        if self._leases.pop(lease_id, None) is not None:
            self._remove([key for key, item in self._keys.items() if item.lease_id == lease_id])

    def _lease_id(self, lease: Lease | None) -> int:
        if lease is None:
            return 0
        if lease.id not in self._leases:
            raise LeaseExpiredError(
                f"lease {lease.id} (ttl {lease.ttl_s} s) is gone: it expired or was revoked; "
                "grant a new one and write its keys again"
            )
        return lease.id

    def _mod_revision(self, key: str) -> int:
        item = self._keys.get(key)
        return 0 if item is None else item.mod_revision

    def _write(self, puts: Mapping[str, bytes], lease_id: int) -> None:
        if not puts:
            return
        self._revision += 1
        for key, value in puts.items():
            item = KeyValue(key, value, self._revision, lease_id)
            self._keys[key] = item
            self._events.append(Put(item))
        self._trim()

    def _remove(self, keys: Sequence[str]) -> bool:
        if not keys:
            return False
        self._revision += 1
        for key in keys:
            del self._keys[key]
            self._events.append(Deleted(key, self._revision))
        self._trim()
        return True

    def _trim(self) -> None:
        if len(self._events) > self._history:
            self.compact(self._events[len(self._events) - self._history - 1].mod_revision)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _sleep_until_change(self, changed: asyncio.Event) -> None:
        """Until something is written, or the next lease runs out."""
        deadline_s = min((lease.deadline_s for lease in self._leases.values()), default=None)
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return
