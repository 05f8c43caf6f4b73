"""`EtcdStore`: the membership store on an etcd cluster of one or more members, v3 API.

A write whose answer got lost is tried again. For a compare-and-swap the second try is also the
read-back: it is refused when the first was carried out, and then the keys hold what was to be put.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rallypoint.daemon.errors import (
    CompactedError,
    LeaseExpiredError,
    StorePermissionError,
    StoreUnavailableError,
)
from rallypoint.daemon.etcd import rpc_pb2
from rallypoint.daemon.etcd.connection import Access, Connection, Method, Observe, Stream
from rallypoint.daemon.executors.store import (
    Deleted,
    KeyValue,
    Lease,
    Listing,
    Put,
    Swapped,
    WatchEvent,
)

_RANGE: Final = Method[rpc_pb2.RangeRequest, rpc_pb2.RangeResponse](
    "KV", "Range", rpc_pb2.RangeResponse
)
_PUT: Final = Method[rpc_pb2.PutRequest, rpc_pb2.PutResponse]("KV", "Put", rpc_pb2.PutResponse)
_DELETE: Final = Method[rpc_pb2.DeleteRangeRequest, rpc_pb2.DeleteRangeResponse](
    "KV", "DeleteRange", rpc_pb2.DeleteRangeResponse
)
_TXN: Final = Method[rpc_pb2.TxnRequest, rpc_pb2.TxnResponse]("KV", "Txn", rpc_pb2.TxnResponse)
_GRANT: Final = Method[rpc_pb2.LeaseGrantRequest, rpc_pb2.LeaseGrantResponse](
    "Lease", "LeaseGrant", rpc_pb2.LeaseGrantResponse
)
_REVOKE: Final = Method[rpc_pb2.LeaseRevokeRequest, rpc_pb2.LeaseRevokeResponse](
    "Lease", "LeaseRevoke", rpc_pb2.LeaseRevokeResponse
)
_KEEPALIVE: Final = Method[rpc_pb2.LeaseKeepAliveRequest, rpc_pb2.LeaseKeepAliveResponse](
    "Lease", "LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse
)
_WATCH: Final = Method[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse](
    "Watch", "Watch", rpc_pb2.WatchResponse
)
_WATCH_PAUSE_S: Final = 0.2


class EtcdStore:
    """`MembershipStore` on etcd. ``detect_s`` bounds each call, a third of it each try, so that one
    frozen member or a change of leader costs no lease of ``detect_s``. ``total_s`` lets calls wait
    longer than that. ``observe`` is told how long each call took.

    It belongs to the event loop that first uses it. Raises `ConfigError` when a file of ``access``
    cannot be read.
    """

    def __init__(
        self,
        access: Access,
        *,
        detect_s: float,
        total_s: float | None = None,
        observe: Observe = lambda label, seconds, error: None,
    ) -> None:
        self._connection = Connection(
            access, try_s=detect_s / 3, total_s=total_s or detect_s, observe=observe
        )

    async def get(self, key: str) -> KeyValue | None:
        response, _ = await self._connection.call(_RANGE, _range(key))
        return _item(response.kvs)

    async def list(self, prefix: str, *, end: str = "") -> Listing:
        key, range_end = _span(prefix, end)
        request = rpc_pb2.RangeRequest(key=key, range_end=range_end)
        response, _ = await self._connection.call(_RANGE, request)
        return Listing(response.header.revision, tuple(map(_key_value, response.kvs)))

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        response, _ = await self._connection.call(_PUT, _put(key, value, lease))
        return response.header.revision

    async def compare_and_swap(
        self, puts: Mapping[str, bytes], compare: Mapping[str, int], lease: Lease | None = None
    ) -> Swapped:
        keys = list(dict.fromkeys((*compare, *puts)))
        reads = [rpc_pb2.RequestOp(request_range=_range(key)) for key in keys]
        request = rpc_pb2.TxnRequest(
            compare=[_unchanged(key, revision) for key, revision in compare.items()],
            success=[
                *(rpc_pb2.RequestOp(request_put=_put(k, v, lease)) for k, v in puts.items()),
                *reads,
            ],
            failure=reads,
        )
        response, uncertain = await self._connection.call(_TXN, request)
        ranges = response.responses[len(puts) :] if response.succeeded else response.responses
        current = {
            key: _item(answer.response_range.kvs) for key, answer in zip(keys, ranges, strict=True)
        }
        revision = response.header.revision
        if not response.succeeded and uncertain:
            written = _written_before(puts, compare, current, lease)
            if written:
                return Swapped(True, written, current)
        return Swapped(response.succeeded, revision, current)

    async def delete(self, key: str) -> bool:
        request = rpc_pb2.DeleteRangeRequest(key=key.encode())
        response, _ = await self._connection.call(_DELETE, request)
        return response.deleted > 0

    async def grant(self, ttl_s: float) -> Lease:
        asked_s = time.monotonic()
        request = rpc_pb2.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        response, _ = await self._connection.call(_GRANT, request)
        # Of an uncertain grant the first lease may run out unused; ours began with the last try,
        # later than asked, so the deadline errs on the safe side.
        return Lease(response.ID, ttl_s, asked_s + ttl_s)

    async def keepalive(self, lease: Lease) -> Lease:
        asked_s = time.monotonic()
        response = await self._connection.ask(
            _KEEPALIVE, rpc_pb2.LeaseKeepAliveRequest(ID=lease.id)
        )
        if response.TTL <= 0:
            raise LeaseExpiredError(
                f"lease {lease.id} (ttl {lease.ttl_s} s) is gone: it expired or was revoked; "
                "grant a new one and write its keys again"
            )
        return replace(lease, deadline_s=asked_s + lease.ttl_s)

    async def revoke(self, lease: Lease) -> None:
        try:
            await self._connection.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease.id))
        except LeaseExpiredError:
            return  # gone already, which is what was wanted

    async def watch(
        self, prefix: str, from_revision: int, *, end: str = ""
    ) -> AsyncIterator[WatchEvent]:
        key, range_end = _span(prefix, end)
        next_revision = max(1, from_revision)
        denied = 0
        for attempt in itertools.count():
            if attempt:
                await asyncio.sleep(_WATCH_PAUSE_S)
            if self._connection.closed:
                return
            create = rpc_pb2.WatchCreateRequest(
                key=key, range_end=range_end, start_revision=next_revision
            )
            try:
                async with self._connection.stream(_WATCH) as stream:
                    await self._begin(stream, create, prefix)
                    denied = 0
                    while True:
                        response = await stream.receive()
                        _refuse_canceled(response, prefix, next_revision)
                        for event in response.events:
                            yield _watch_event(event)
                        if response.events:
                            next_revision = response.events[-1].kv.mod_revision + 1
            except StorePermissionError:
                denied += 1  # an expired token is refused in these words too
                if denied > 1:
                    raise
                await self._connection.renew_token()
            except StoreUnavailableError:
                continue

    async def close(self) -> None:
        await self._connection.close()

    async def _begin(
        self,
        stream: Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse],
        create: rpc_pb2.WatchCreateRequest,
        prefix: str,
    ) -> None:
        with self._connection.timed(_WATCH):
            await stream.send(rpc_pb2.WatchRequest(create_request=create))
            first = await stream.receive(self._connection.try_s)
        _refuse_canceled(first, prefix, create.start_revision)


def _refuse_canceled(response: rpc_pb2.WatchResponse, prefix: str, from_revision: int) -> None:
    """After this message the stream stays open and says nothing more."""
    if not response.canceled:
        return
    if response.compact_revision:
        raise CompactedError(prefix, from_revision, response.compact_revision)
    if "permission" in response.cancel_reason.lower() or "auth" in response.cancel_reason:
        raise StorePermissionError(
            f"etcd Watch of {prefix!r}: {response.cancel_reason}: the user's role must include reading "
            "this prefix"
        )
    raise StoreUnavailableError(f"watch of {prefix!r} was canceled: {response.cancel_reason}")


def _written_before(
    puts: Mapping[str, bytes],
    compare: Mapping[str, int],
    current: Mapping[str, KeyValue | None],
    lease: Lease | None,
) -> int:
    """The revision of our own earlier try, when the keys hold exactly what it would have put; else 0."""
    lease_id = 0 if lease is None else lease.id
    revisions = set()
    for key, value in puts.items():
        item = current[key]
        if item is None or (item.value, item.lease_id) != (value, lease_id):
            return 0
        revisions.add(item.mod_revision)
    unique = len(revisions) == 1 and not revisions & set(compare.values())
    return revisions.pop() if unique else 0


def _span(prefix: str, end: str) -> tuple[bytes, bytes]:
    """First key and end of the range of all keys with a prefix, or of those before ``end``; the end is
    exclusive."""
    if end:
        return prefix.encode() or b"\0", end.encode()
    if not prefix:
        return b"\0", b"\0"  # every key
    key = prefix.encode()
    return key, key[:-1] + bytes([key[-1] + 1])  # UTF-8 never ends in 0xff


def _range(key: str) -> rpc_pb2.RangeRequest:
    return rpc_pb2.RangeRequest(key=key.encode())


def _put(key: str, value: bytes, lease: Lease | None) -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(key=key.encode(), value=value, lease=0 if lease is None else lease.id)


def _unchanged(key: str, mod_revision: int) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL,
        target=rpc_pb2.Compare.MOD,
        key=key.encode(),
        mod_revision=mod_revision,
    )


def _item(items: Sequence[rpc_pb2.KeyValue]) -> KeyValue | None:
    return _key_value(items[0]) if items else None


def _key_value(item: rpc_pb2.KeyValue) -> KeyValue:
    return KeyValue(item.key.decode(), item.value, item.mod_revision, item.lease)


def _watch_event(event: rpc_pb2.Event) -> WatchEvent:
    if event.type == rpc_pb2.Event.DELETE:
        return Deleted(event.kv.key.decode(), event.kv.mod_revision)
    return Put(_key_value(event.kv))
