"""A membership store below a prefix of its own, so that tests share one server."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from rallypoint.daemon.executors.store import (
    Deleted,
    KeyValue,
    Lease,
    Listing,
    MembershipStore,
    Swapped,
    WatchEvent,
)


class PrefixedStore:
    """`MembershipStore` on another one; remembers its leases, so that none outlives the test."""

    def __init__(self, store: MembershipStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.leases: list[Lease] = []

    async def get(self, key: str) -> KeyValue | None:
        return self._item(await self._store.get(self._prefix + key))

    async def list(self, prefix: str, *, end: str = "") -> Listing:
        end = end and self._prefix + end
        listing = await self._store.list(self._prefix + prefix, end=end)
        items = (self._item(item) for item in listing.items)
        return Listing(listing.revision, tuple(item for item in items if item is not None))

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        return await self._store.put(self._prefix + key, value, lease)

    async def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        swapped = await self._store.compare_and_swap(
            {self._prefix + key: value for key, value in puts.items()},
            {self._prefix + key: revision for key, revision in compare.items()},
            lease,
        )
        current = {self._key(key): self._item(item) for key, item in swapped.current.items()}
        return replace(swapped, current=current)

    async def delete(self, key: str) -> bool:
        return await self._store.delete(self._prefix + key)

    async def grant(self, ttl_s: float) -> Lease:
        lease = await self._store.grant(ttl_s)
        self.leases.append(lease)
        return lease

    async def keepalive(self, lease: Lease) -> Lease:
        return await self._store.keepalive(lease)

    async def revoke(self, lease: Lease) -> None:
        await self._store.revoke(lease)

    async def watch(
        self, prefix: str, from_revision: int, *, end: str = ""
    ) -> AsyncIterator[WatchEvent]:
        end = end and self._prefix + end
        async for event in self._store.watch(self._prefix + prefix, from_revision, end=end):
            if isinstance(event, Deleted):
                yield replace(event, key=self._key(event.key))
            else:
                yield replace(event, item=replace(event.item, key=self._key(event.item.key)))

    async def close(self) -> None:
        await self._store.close()

    def _key(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _item(self, item: KeyValue | None) -> KeyValue | None:
        return None if item is None else replace(item, key=self._key(item.key))
