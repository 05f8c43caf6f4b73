"""Membership stores for the contract suite, and the few things that a test does to their servers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from rallypoint.daemon.etcd.store import EtcdStore
from rallypoint.daemon.executors.embedded import EmbeddedStore
from rallypoint.daemon.executors.store import Deleted, Lease, MembershipStore
from tests.fakes.etcd_server import EtcdCluster, cluster, packaged_binaries, system_binaries
from tests.fakes.stores import PrefixedStore


class Harness(Protocol):
    """A store, and what a test does to its server."""

    store: MembershipStore

    async def run_out(self, lease: Lease) -> None:
        """Let the time of a lease pass."""

    async def pass_s(self, seconds: float) -> None: ...

    async def compact(self, revision: int) -> None: ...

    async def clean_up(self) -> None:
        """Leave nothing that a later test could notice."""


Make = Callable[[], Harness]


class EmbeddedHarness:
    """The store in memory, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._embedded = EmbeddedStore(lambda: self.now)
        self.store: MembershipStore = self._embedded

    async def run_out(self, lease: Lease) -> None:
        self.now += lease.ttl_s
        await self.store.get("anything")

    async def pass_s(self, seconds: float) -> None:
        self.now += seconds

    async def compact(self, revision: int) -> None:
        self._embedded.compact(revision)

    async def clean_up(self) -> None:
        await self.store.close()


class EtcdHarness:
    """A real cluster that all tests share; each has a prefix of its own. Time passes by itself."""

    def __init__(self, servers: EtcdCluster, prefix: str) -> None:
        self._servers = servers
        self._prefixed = PrefixedStore(EtcdStore(servers.access, detect_s=5.0), prefix)
        self.store: MembershipStore = self._prefixed

    async def run_out(self, lease: Lease) -> None:
        listing = await self.store.list("")
        watch = self.store.watch("", listing.revision + 1)
        if any(item.lease_id == lease.id for item in listing.items):
            assert isinstance(await anext(watch), Deleted)

    async def pass_s(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def compact(self, revision: int) -> None:
        # etcd keeps the compacted revision itself watchable.
        newest = min(revision + 1, (await self.store.list("")).revision)
        self._servers.ctl("compact", str(newest))

    async def clean_up(self) -> None:
        await self.store.close()
        other = EtcdStore(self._servers.access, detect_s=5.0)
        for lease in self._prefixed.leases:
            await other.revoke(lease)
        await other.close()


@contextmanager
def embedded(directory: Path) -> Iterator[Make]:
    yield EmbeddedHarness


@contextmanager
def etcd(binaries: Callable[[], Path], size: int, directory: Path) -> Iterator[Make]:
    numbers = count()
    with cluster(directory, size, binaries()) as servers:
        yield lambda: EtcdHarness(servers, f"/test-{next(numbers)}/")


HARNESSES: dict[str, Callable[[Path], AbstractContextManager[Make]]] = {
    "embedded": embedded,
    "etcd of one": partial(etcd, system_binaries, 1),
    "etcd of three": partial(etcd, system_binaries, 3),
    "etcd 3.5": partial(etcd, packaged_binaries, 1),
}
