"""The same histories of operations on the store in memory and on a real etcd: the same answers. The
keyspace in memory is what the cluster simulation takes for etcd."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.errors import LeaseExpiredError
from rallypoint.daemon.executors.store import KeyValue, Lease, Put
from tests.fakes.store_harnesses import HARNESSES, Harness

KEYS = ("generation", "job", "leader", "members/a", "members/b")
OPERATIONS = 150
HISTORIES = 4
TTL_S = 60.0


@dataclass(frozen=True)
class Operation:
    """One request; ``lease`` and ``revision`` point back to what earlier ones returned."""

    name: str
    keys: tuple[str, ...] = ()
    lease: int | None = None
    revision: int = 0
    value: bytes = b""


def history(seed: int) -> list[Operation]:
    choose = random.Random(seed)  # noqa: S311 - reproducible, nothing secret
    names = ["put"] * 4 + ["swap"] * 5 + ["get", "list", "delete", "grant", "keepalive", "revoke"]
    found = [Operation("grant")]
    for number in range(OPERATIONS):
        lease = choose.randrange(6) if choose.random() < 0.4 else None
        keys = tuple(choose.sample(KEYS, choose.choice([1, 1, 2])))
        value = b"%d" % number
        found.append(Operation(choose.choice(names), keys, lease, choose.randrange(4), value))
    return found


class Player:
    """Plays a history; answers are made comparable: revisions from the first, leases by their order."""

    def __init__(self, harness: Harness) -> None:
        self._store = harness.store
        self._base = 0
        self._leases: list[Lease] = []
        self._seen: dict[str, list[int]] = {key: [0] for key in KEYS}

    async def play(self, operations: list[Operation]) -> list[Any]:
        self._base = (await self._store.list("")).revision
        answers = []
        for operation in operations:
            try:
                answers.append(await self._do(operation))
            except LeaseExpiredError:
                answers.append("lease gone")
        return [*answers, *await self._watched()]

    async def _do(self, operation: Operation) -> Any:
        store, key, lease = self._store, next(iter(operation.keys), ""), self._lease(operation)
        match operation.name:
            case "grant":
                self._leases.append(await store.grant(TTL_S))
                return None
            case "keepalive":
                return (await store.keepalive(lease or self._leases[0])).ttl_s
            case "revoke":
                return await store.revoke(lease or self._leases[-1])
            case "put":
                return self._note(key, await store.put(key, operation.value, lease))
            case "delete":
                return await store.delete(key)
            case "get":
                return self._item(await store.get(key))
            case "list":
                listing = await store.list("members/")
                return listing.revision - self._base, [self._item(i) for i in listing.items]
        compare = {k: self._seen[k][-1 - operation.revision % len(self._seen[k])] for k in KEYS[:2]}
        swapped = await store.compare_and_swap(
            dict.fromkeys(operation.keys, operation.value), compare, lease
        )
        for changed in operation.keys if swapped.succeeded else ():
            self._note(changed, swapped.revision)
        current = {k: self._item(i) for k, i in sorted(swapped.current.items())}
        return swapped.succeeded, swapped.revision - self._base, current

    async def _watched(self) -> list[Any]:
        newest = await self._store.put("end", b"")
        found: list[Any] = []
        async for event in self._store.watch("", self._base + 1):
            item = self._item(event.item) if isinstance(event, Put) else event.key
            found.append((event.mod_revision - self._base, item))
            if event.mod_revision == newest:
                break
        return sorted(found, key=repr)  # keys of one revision come in any order

    def _lease(self, operation: Operation) -> Lease | None:
        if operation.lease is None:
            return None
        return self._leases[operation.lease % len(self._leases)]

    def _note(self, key: str, revision: int) -> int:
        self._seen[key].append(revision)
        return revision - self._base

    def _item(self, item: KeyValue | None) -> Any:
        if item is None:
            return None
        leases = [lease.id for lease in self._leases]
        lease = leases.index(item.lease_id) if item.lease_id in leases else None
        return item.key, item.value, item.mod_revision - self._base, lease


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in HARNESSES if name != "embedded"])
def test_a_history_has_the_same_answers_in_memory_and_on_etcd(kind: str, tmp_path: Path) -> None:
    async def answers(harness: Harness, seed: int) -> list[Any]:
        try:
            async with asyncio.timeout(60):
                return await Player(harness).play(history(seed))
        finally:
            await harness.clean_up()

    with HARNESSES["embedded"](tmp_path) as memory, HARNESSES[kind](tmp_path / "etcd") as real:
        for seed in range(HISTORIES):
            expected = asyncio.run(answers(memory(), seed))
            assert asyncio.run(answers(real(), seed)) == expected, f"history {seed}"
            assert "lease gone" in expected
            assert any(isinstance(a, tuple) and a[0] is False for a in expected)
