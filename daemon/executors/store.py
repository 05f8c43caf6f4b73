"""The membership store: a small key-value store with revisions, leases and watches.

Two implementations stand behind one Protocol and one contract suite. The store has one revision
counter; every change (a put, a delete, a transaction, the end of a lease) takes the next revision,
and all keys of a transaction carry the same one. Keys are text, values are bytes.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class KeyValue:
    """A key as of some revision."""

    key: str
    value: bytes
    mod_revision: int
    """Revision of its last change."""
    lease_id: int = 0
    """The lease it goes with; 0: none."""


@dataclass(frozen=True)
class Listing:
    """All keys below a prefix, ascending, as of ``revision``; watch on from ``revision + 1``."""

    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Swapped:
    """Outcome of a compare-and-swap."""

    succeeded: bool
    revision: int
    """The revision it wrote, or the store's at the refusal."""
    current: Mapping[str, KeyValue | None]
    """Every key compared or put, as of ``revision``; None: it does not exist."""


@dataclass(frozen=True)
class Lease:
    """A promise to be there, kept by `MembershipStore.keepalive`."""

    id: int
    ttl_s: float
    deadline_s: float
    """Monotonic time after which the holder must take it for lost; counted from *before* the request
    was sent, so it is never later than the store's own."""


@dataclass(frozen=True)
class Put:
    """A key was written."""

    item: KeyValue

    @property
    def mod_revision(self) -> int:
        return self.item.mod_revision


@dataclass(frozen=True)
class Deleted:
    """A key was deleted, or its lease ended."""

    key: str
    mod_revision: int


WatchEvent = Put | Deleted


class MembershipStore(Protocol):
    """Every method raises `StoreUnavailableError` when no answer comes in time or after `close`, and
    may raise `StorePermissionError`; those that write may raise `StoreQuotaError`. A watch goes on by
    itself once the store answers again."""

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it does not exist."""
        ...

    async def list(self, prefix: str, *, end: str = "") -> Listing:
        """All keys that start with ``prefix``, with ``end`` only those before it, and the revision that
        this is true of."""
        ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; without ``lease`` the key outlives every lease. Returns the revision.
        Raises `LeaseExpiredError` when the lease is gone; then nothing is written."""
        ...

    async def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        """One transaction: write all of ``puts`` if every key of ``compare`` still has that
        ``mod_revision`` (0: does not exist), else nothing. ``lease`` goes with all puts; raises
        `LeaseExpiredError` when it is gone and the comparison holds. Refused also when all was
        written, its answer got lost, and somebody else has written since."""
        ...

    async def delete(self, key: str) -> bool:
        """Whether the key existed; False also when the answer to a first try got lost."""
        ...

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease."""
        ...

    async def keepalive(self, lease: Lease) -> Lease:
        """The lease with a new deadline. Raises `LeaseExpiredError` when it is gone."""
        ...

    async def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys, in one revision; no effect when it is gone."""
        ...

    def watch(self, prefix: str, from_revision: int, *, end: str = "") -> AsyncIterator[WatchEvent]:
        """Changes of the keys of `list` with ``mod_revision >= from_revision``, past ones first, in
        order of revision, each once, without end. Ends when the store is closed. Raises `CompactedError`
        when revisions it has not delivered are gone."""
        ...

    async def close(self) -> None:
        """End every watch; nothing can be asked afterwards. Leases run out by themselves."""
        ...
