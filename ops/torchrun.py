"""Rendezvous on etcd's v3 API for stock torchrun: ``torchrun --rdzv-backend etcd3``.

torch itself speaks only etcd's v2 API, which etcd 3.6 no longer has. Agents agree through one key
by compare-and-swap, with torch's own dynamic rendezvous, and share a store of keys beside it. All
keys are below ``/torchrun/<run id>/`` and live under leases of the agents, so that they vanish
``ttl_s`` after the last agent has gone.

``--rdzv-endpoint`` takes ``host:port`` of several members, separated by commas; ``--rdzv-conf`` takes
``ca_file``, ``cert_file``, ``key_file``, ``user``, ``password_file``, ``outage_s`` (how long a request
waits for etcd, 60), ``ttl_s`` (60) and what torch's own backends take.
"""

import asyncio
import atexit
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from rallypoint.daemon.errors import CompactedError, LeaseExpiredError, StoreError
from rallypoint.daemon.etcd.connection import Access
from rallypoint.daemon.etcd.store import EtcdStore
from rallypoint.daemon.executors.store import Deleted, Lease, Swapped
from rallypoint.daemon.shared import storecheck
from rallypoint.daemon.shared.errors import ConfigError

NAME: Final = "etcd3"
_TRY_S: Final = 5.0
"""Three tries of a request get no answer within this; see `EtcdStore`."""
_RETRY_S: Final = 0.5

T = TypeVar("T")


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun loads from the entry-point group ``torchrun.handlers``."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    keys = LeasedKeys(params)
    made: _Handler = _Handler.from_backend(
        params.run_id,
        AgentStore(keys),
        StateBackend(keys),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(
            *(_seconds(params, key) for key in ("join", "last_call", "close", "heartbeat"))
        ),
        keep_alive_interval=params.get_as_int("keep_alive_interval") or 5,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt") or 3,
    )
    return made


def _seconds(params: RendezvousParameters, key: str) -> timedelta | None:
    value = params.get_as_int(f"{key}_timeout")
    return None if value is None else timedelta(seconds=value)


def _positive(params: RendezvousParameters, key: str) -> float:
    """Seconds; 60 where they are not given."""
    given = params.get(key, 60)
    with contextlib.suppress(TypeError, ValueError):
        if 0 < (seconds := float(given)) < math.inf:
            return seconds
    raise ConfigError(f"--rdzv-conf {key}={given}: must be seconds, more than 0")


class _Handler(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        # torch 2.13 keeps the address that it was told in its first round for all later ones, also
        # when the agent there, rank 0 of that round, is the one that died.
        self._bootstrap_store_info = None
        return super().next_rendezvous()


class LeasedKeys:
    """Keys of one run, written under a lease that a thread of its own keeps; blocking calls.

    Every call raises `StoreError` when etcd refuses, or does not answer within ``outage_s``.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        def path(key: str) -> Path | None:
            value = params.get(key)
            return None if value is None else Path(value)

        endpoints = tuple(part.strip() for part in params.endpoint.split(","))
        storecheck.require_endpoints(endpoints, "--rdzv-endpoint")
        access = Access(
            endpoints=endpoints,
            ca_file=path("ca_file"),
            cert_file=path("cert_file"),
            key_file=path("key_file"),
            user=params.get("user"),
            password_file=path("password_file"),
        )
        self.prefix = f"/torchrun/{params.run_id}/"
        self._ttl_s = _positive(params, "ttl_s")
        self._store = EtcdStore(access, detect_s=_TRY_S, total_s=_positive(params, "outage_s"))
        self._lease: Lease | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd3", daemon=True)
        self._thread.start()
        self._keeping = asyncio.run_coroutine_threadsafe(self._keep_lease(), self._loop)
        atexit.register(self.close)

    def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and revision of a key, or None."""
        item = self._run(self._store.get(self.prefix + key))
        return None if item is None else (item.value, item.mod_revision)

    def put(self, values: dict[str, bytes]) -> None:
        self._run(self._swap(values, {}))

    def swap(self, key: str, value: bytes, revision: int) -> tuple[bool, tuple[bytes, int] | None]:
        """Write a key that still has this revision (0: is not there). Whether it was written, and
        what is there now."""
        swapped = self._run(self._swap({key: value}, {key: revision}))
        item = swapped.current[self.prefix + key]
        return swapped.succeeded, None if item is None else (item.value, item.mod_revision)

    def wait(self, keys: Iterable[str], timeout: timedelta) -> dict[str, bytes]:
        """The values of these keys, as soon as all are there. Raises TimeoutError."""

        async def bounded() -> dict[str, bytes]:
            async with asyncio.timeout(timeout.total_seconds()):
                return await self._wait({self.prefix + key for key in keys})

        found = self._run(bounded())
        return {key.removeprefix(self.prefix): value for key, value in found.items()}

    # --- in the thread ------------------------------------------------------------------------

    async def _wait(self, wanted: set[str]) -> dict[str, bytes]:
        while True:
            listing = await self._store.list(self.prefix)
            found = {item.key: item.value for item in listing.items if item.key in wanted}
            if found.keys() == wanted:
                return found
            try:
                async for event in self._store.watch(self.prefix, listing.revision + 1):
                    if not isinstance(event, Deleted) and event.item.key in wanted:
                        found[event.item.key] = event.item.value
                    if found.keys() == wanted:
                        return found
            except CompactedError:
                continue  # list again

    async def _swap(self, values: dict[str, bytes], compare: dict[str, int]) -> Swapped:
        puts = {self.prefix + key: value for key, value in values.items()}
        revisions = {self.prefix + key: revision for key, revision in compare.items()}
        while True:
            if self._lease is None:
                self._lease = await self._store.grant(self._ttl_s)
            try:
                return await self._store.compare_and_swap(puts, revisions, self._lease)
            except LeaseExpiredError:
                self._lease = None  # etcd was away for longer than it lasts

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 6)
            try:
                if self._lease is not None:
                    self._lease = await self._store.keepalive(self._lease)
            except LeaseExpiredError:
                self._lease = None
            except StoreError:
                await asyncio.sleep(_RETRY_S)  # whoever asks for something is told

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """The keys stay: other agents may need them, and the lease ends by itself."""
        atexit.unregister(self.close)
        self._keeping.cancel()
        self._run(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class StateBackend(RendezvousBackend):
    """The rendezvous state in one key; its token is the key's revision."""

    def __init__(self, keys: LeasedKeys) -> None:
        self._keys = keys

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            return self._keys.get("state")
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state of this token (None: there is none yet). The state that is there now, its
        token, and whether it is ours; None when it is gone. Raises RendezvousConnectionError."""
        try:
            written, now = self._keys.swap("state", state, token or 0)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if now is None else (*now, written)


class AgentStore(Store):
    """torch's key-value store of the agents, which tells them the address of rank 0."""

    def __init__(self, keys: LeasedKeys) -> None:
        super().__init__()
        self._keys = keys

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write several keys at once."""
        self._keys.put({_name(k): _bytes(v) for k, v in zip(keys, values, strict=True)})

    def get(self, key: str) -> bytes:
        """The value, as soon as it is there. Raises DistStoreError after the store's timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several values, as soon as all are there."""
        found = self._wait(keys, None)
        return [found[_name(key)] for key in keys]

    def add(self, key: str, value: int) -> int:
        """Add to a decimal number that begins at 0; the sum."""
        now = self._keys.get(_name(key))
        while True:
            total = value + (0 if now is None else int(now[0]))
            written, now = self._keys.swap(
                _name(key), str(total).encode(), 0 if now is None else now[1]
            )
            if written:
                return total

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there now."""
        return all(self._keys.get(_name(key)) is not None for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace the expected value ("": the key is not there); what is there afterwards."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        now = self._keys.get(_name(key))
        while (now[0] if now is not None else b"") == expected:
            revision = 0 if now is None else now[1]
            written, now = self._keys.swap(_name(key), desired, revision)
            if written:
                return desired
        return expected if now is None else now[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there. Raises DistStoreError after ``timeout``, or the store's own."""
        self._wait(keys, timeout)

    def _wait(self, keys: list[str], timeout: timedelta | None) -> dict[str, bytes]:
        bound: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        try:
            return self._keys.wait({_name(key) for key in keys}, bound)
        except TimeoutError as error:
            raise DistStoreError(f"{keys}: not all written within {bound}") from error


def _name(key: str) -> str:
    return f"store/{key}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
