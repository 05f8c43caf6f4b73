"""Histories of store operations: played on a store, they give what it answered, in terms that do not
depend on its revision numbers or lease ids. A model of etcd is checked by playing the same history on
both: equal answers, or the model is wrong."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rallypoint.daemon.errors import StoreError
from rallypoint.daemon.executors.store import Deleted, KeyValue, Lease, MembershipStore

Kind = Literal["get", "list", "put", "swap", "delete", "grant", "keepalive", "revoke"]
KEYS = ("a/1", "a/2", "b/1")


@dataclass(frozen=True)
class Operation:
    """One request. ``lease``: number of the grant in this history, or None. ``stale``: a swap that
    compares a revision that is not the key's."""

    kind: Kind
    key: str = ""
    value: bytes = b""
    lease: int | None = None
    stale: bool = False


def random_history(seed: int, length: int) -> list[Operation]:
    """Operations on few keys and leases, so that they meet."""
    choose = random.Random(seed)  # noqa: S311 - a seeded history
    kinds: tuple[Kind, ...] = ("get", "list", "put", "swap", "delete", "keepalive", "revoke")
    history, grants = [Operation("grant")], 1
    for number in range(length):
        kind = choose.choice((*kinds, "put", "swap", "grant"))
        lease = choose.choice((None, choose.randrange(grants)))
        if kind in ("keepalive", "revoke"):
            lease = choose.randrange(grants)
        grants += kind == "grant"
        value = f"{number}".encode()
        history.append(Operation(kind, choose.choice(KEYS), value, lease, choose.random() < 0.3))
    return history


@dataclass
class Player:
    """Plays a history; leases last longer than any."""

    store: MembershipStore
    first_revision: int = 0
    leases: list[Lease] = field(default_factory=list)

    async def play(self, history: Sequence[Operation]) -> list[object]:
        """What each operation was answered, and at last every change that a watch saw."""
        self.first_revision = (await self.store.list("")).revision
        answers: list[object] = []
        for operation in history:
            try:
                answers.append(await self._ask(operation))
            except StoreError as error:
                answers.append(type(error).__name__)
        await self.store.put("end", b"")
        async for event in self.store.watch("", self.first_revision + 1):
            if isinstance(event, Deleted):
                answers.append(("deleted", event.key, event.mod_revision - self.first_revision))
            else:
                answers.append(self._item(event.item))
                if event.item.key == "end":
                    break
        for lease in self.leases:
            await self.store.revoke(lease)
        return answers

    async def _ask(self, operation: Operation) -> object:
        store, key = self.store, operation.key
        lease = None if operation.lease is None else self.leases[operation.lease]
        match operation.kind:
            case "get":
                return self._item(await store.get(key))
            case "list":
                listing = await store.list(key[:2])
                return listing.revision - self.first_revision, [*map(self._item, listing.items)]
            case "put":
                return await store.put(key, operation.value, lease) - self.first_revision
            case "swap":
                item = await store.get(key)
                revision = (0 if item is None else item.mod_revision) + operation.stale
                swapped = await store.compare_and_swap(
                    {key: operation.value, KEYS[0]: operation.value}, {key: revision}, lease
                )
                found = [(k, self._item(swapped.current[k])) for k in sorted(swapped.current)]
                return swapped.succeeded, swapped.revision - self.first_revision, found
            case "delete":
                return await store.delete(key)
            case "grant":
                self.leases.append(await store.grant(600.0))
                return "granted"
            case "keepalive" | "revoke":
                assert lease is not None
                await (store.keepalive if operation.kind == "keepalive" else store.revoke)(lease)
                return "done"

    def _item(self, item: KeyValue | None) -> object:
        if item is None:
            return None
        ids = [lease.id for lease in self.leases]
        lease = ids.index(item.lease_id) if item.lease_id else None
        return item.key, item.value, item.mod_revision - self.first_revision, lease
