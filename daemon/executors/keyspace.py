"""Keys with revisions, leases and a history: what a membership store is, without waiting for anything.

The embedded store keeps one in memory; the cluster simulation runs many nodes on one in virtual time.
It behaves as etcd does: the same histories of operations are replayed on both.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rallypoint.daemon.errors import CompactedError, LeaseExpiredError
from rallypoint.daemon.executors.store import (
    Deleted,
    KeyValue,
    Lease,
    Listing,
    Put,
    Swapped,
    WatchEvent,
)


class Keyspace:
    """``now`` is monotonic seconds. A lease that has run out ends when `expire` is called. The last
    ``history`` changes can be watched from; older ones are compacted."""

    def __init__(self, *, history: int = 1024) -> None:
        self.revision = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0
        self._events: deque[WatchEvent] = deque()
        self._history = history
        self._oldest = 1

    # --- reads --------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        """The key, or None."""
        return self._keys.get(key)

    def list(self, prefix: str, *, end: str = "") -> Listing:
        """All keys below ``prefix``, with ``end`` only those before it, ascending."""
        keys = sorted(key for key in self._keys if _within(key, prefix, end))
        return Listing(self.revision, tuple(self._keys[key] for key in keys))

    def changes(self, prefix: str, from_revision: int, *, end: str = "") -> tuple[WatchEvent, ...]:
        """Changes of the keys of `list` from this revision on. Raises `CompactedError` when some of them
        are gone."""
        if from_revision < self._oldest:
            raise CompactedError(prefix, from_revision, self._oldest)
        found = []
        for event in reversed(self._events):  # the newest are asked for
            if event.mod_revision < from_revision:
                break
            if _within(event.item.key if isinstance(event, Put) else event.key, prefix, end):
                found.append(event)
        return tuple(reversed(found))

    @property
    def oldest(self) -> int:
        """The oldest revision that can still be watched from."""
        return self._oldest

    # --- writes -------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write; the revision. Raises `LeaseExpiredError` when the lease is gone."""
        self._write({key: value}, self._lease_id(lease))
        return self.revision

    def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        """All of ``puts`` in one revision, if every compared key has its revision (0: no such key)."""
        succeeded = all(self._mod_revision(key) == wanted for key, wanted in compare.items())
        if succeeded:
            self._write(puts, self._lease_id(lease))
        current = {key: self._keys.get(key) for key in (*compare, *puts)}
        return Swapped(succeeded, self.revision, current)

    def delete(self, key: str) -> bool:
        """Whether the key existed."""
        return self._remove([key] if key in self._keys else [])

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including ``revision``: they cannot be watched any more."""
        while self._events and self._events[0].mod_revision <= revision:
            self._events.popleft()
        self._oldest = max(self._oldest, min(revision, self.revision) + 1)

    # --- leases -------------------------------------------------------------------------------

    def grant(self, ttl_s: float, now: float) -> Lease:
        """A new lease."""
        self._last_lease += 1
        lease = Lease(self._last_lease, ttl_s, now + ttl_s)
        self._leases[lease.id] = lease
        return lease

    def keepalive(self, lease: Lease, now: float) -> Lease:
        """The lease with a new deadline. Raises `LeaseExpiredError` when it is gone."""
        self._lease_id(lease)
        renewed = replace(lease, deadline_s=now + lease.ttl_s)
        self._leases[lease.id] = renewed
        return renewed

    def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys, in one revision."""
        if self._leases.pop(lease.id, None) is not None:
            # In order of the keys, as etcd does.
            self._remove(sorted(k for k, i in self._keys.items() if i.lease_id == lease.id))

    def expire(self, now: float) -> None:
        """End every lease that has run out, each in a revision of its own."""
        for lease in [lease for lease in self._leases.values() if lease.deadline_s <= now]:
            self.revoke(lease)

    def extend_leases(self, now: float) -> None:
        """Give every lease its whole time again, as a new leader of an etcd cluster does."""
        for lease in list(self._leases.values()):
            self._leases[lease.id] = replace(lease, deadline_s=now + lease.ttl_s)

    def holds(self, lease: Lease) -> bool:
        """Whether this lease has not ended yet."""
        return lease.id in self._leases

    @property
    def next_expiry_s(self) -> float | None:
        """When the next lease runs out."""
        return min((lease.deadline_s for lease in self._leases.values()), default=None)

    # --- inside -------------------------------------------------------------------------------

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
        self.revision += 1
        for key, value in puts.items():
            item = KeyValue(key, value, self.revision, lease_id)
            self._keys[key] = item
            self._events.append(Put(item))
        self._trim()

    def _remove(self, keys: Sequence[str]) -> bool:
        if not keys:
            return False
        self.revision += 1
        for key in keys:
            del self._keys[key]
            self._events.append(Deleted(key, self.revision))
        self._trim()
        return True

    def _trim(self) -> None:
        if len(self._events) > self._history:
            self.compact(self._events[len(self._events) - self._history - 1].mod_revision)


def _within(key: str, prefix: str, end: str) -> bool:
    # As etcd compares: by the bytes of UTF-8, whose order is that of the code points.
    return key.startswith(prefix) and (not end or key < end)
