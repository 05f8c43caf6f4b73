"""What every membership store promises. An implementation joins by one entry in
`tests.fakes.store_harnesses.HARNESSES`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise

import pytest

from rallypoint.daemon.errors import CompactedError, LeaseExpiredError, StoreUnavailableError
from rallypoint.daemon.executors.embedded import EmbeddedStore
from rallypoint.daemon.executors.store import Deleted, KeyValue, Put, WatchEvent
from tests.fakes.store_harnesses import HARNESSES, Harness, Make

BOUND_S = 60.0

Scenario = Callable[[Harness], Awaitable[None]]


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(kind, marks=() if kind == "embedded" else pytest.mark.slow)
        for kind in HARNESSES
    ],
)
def make_harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    with HARNESSES[request.param](tmp_path_factory.mktemp("store")) as make:
        yield make


@pytest.fixture
def play(make_harness: Make) -> Callable[[Scenario], None]:
    """Play a scenario on a fresh store of each kind, in bounded time."""

    async def bounded(scenario: Scenario) -> None:
        harness = make_harness()
        try:
            async with asyncio.timeout(BOUND_S):
                await scenario(harness)
        finally:
            await harness.clean_up()

    return lambda scenario: asyncio.run(bounded(scenario))


async def take(watch: AsyncIterator[WatchEvent], count: int) -> list[WatchEvent]:
    return [await anext(watch) for _ in range(count)]


def test_a_key_is_there_once_put_and_gone_once_deleted(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        assert await store.get("a/1") is None
        revision = await store.put("a/1", b"x")
        assert await store.get("a/1") == KeyValue("a/1", b"x", revision)
        assert await store.delete("a/1")
        assert await store.get("a/1") is None
        assert not await store.delete("a/1")

    play(scenario)


def test_every_change_takes_the_next_revision(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        revisions = [await store.put("a", b"1"), await store.put("b", b"1")]
        revisions.append(await store.put("a", b"2"))
        await store.delete("b")
        revisions.append((await store.list("")).revision)
        assert all(after == before + 1 for before, after in pairwise(revisions))

    play(scenario)


def test_a_listing_holds_the_prefix_in_order_with_its_revision(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        for key in ("a/2", "b/1", "a/1"):
            await store.put(key, key.encode())
        listing = await store.list("a/")
        assert [item.key for item in listing.items] == ["a/1", "a/2"]
        assert listing.revision == (await store.list("")).revision
        assert (await store.list("c/")).items == ()

    play(scenario)


def test_compare_and_swap_writes_all_or_nothing(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        first = await store.compare_and_swap({"p": b"1", "q": b"1"}, {"p": 0, "q": 0})
        assert first.succeeded
        written = first.current["p"], first.current["q"]
        assert [item and item.mod_revision for item in written] == [first.revision] * 2
        moved = await store.put("q", b"2")
        lost = await store.compare_and_swap(
            {"p": b"3", "q": b"3"}, {"p": first.revision, "q": first.revision}
        )
        assert not lost.succeeded
        assert lost.current == {
            "p": KeyValue("p", b"1", first.revision),
            "q": KeyValue("q", b"2", moved),
        }
        assert lost.revision == moved
        won = await store.compare_and_swap(
            {"p": b"4"}, {"p": first.revision, "q": moved, "absent": 0}
        )
        assert won.succeeded
        assert won.current["absent"] is None
        assert (await store.get("p")) == KeyValue("p", b"4", won.revision)

    play(scenario)


def test_of_two_writers_from_the_same_revision_one_wins(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        results = await asyncio.gather(
            *(store.compare_and_swap({"leader": name}, {"leader": 0}) for name in (b"x", b"y"))
        )
        winners = [result for result in results if result.succeeded]
        losers = [result for result in results if not result.succeeded]
        assert len(winners) == 1
        assert losers[0].current == winners[0].current

    play(scenario)


def test_keys_of_a_lease_go_together_when_it_runs_out(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        lease = await store.grant(2.0)
        await store.put("members/a", b"1", lease)
        await store.compare_and_swap({"leader": b"a"}, {"leader": 0}, lease)
        await store.put("job", b"1")
        before = (await store.list("")).revision
        await harness.run_out(lease)
        listing = await store.list("")
        assert [item.key for item in listing.items] == ["job"]
        assert listing.revision == before + 1
        with pytest.raises(LeaseExpiredError, match="grant a new one"):
            await store.put("members/a", b"2", lease)
        with pytest.raises(LeaseExpiredError):
            await store.compare_and_swap({"x": b"1"}, {}, lease)
        with pytest.raises(LeaseExpiredError):
            await store.keepalive(lease)
        assert not (await store.compare_and_swap({"x": b"1"}, {"job": 0}, lease)).succeeded
        assert await store.get("x") is None

    play(scenario)


def test_keepalive_moves_the_deadline(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        lease = await store.grant(2.0)
        await store.put("k", b"1", lease)
        await harness.pass_s(1.5)
        renewed = await store.keepalive(lease)
        assert renewed.id == lease.id
        assert renewed.deadline_s > lease.deadline_s
        await harness.pass_s(1.5)
        assert await store.get("k") is not None

    play(scenario)


def test_a_put_without_lease_frees_the_key_from_it(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        lease = await store.grant(2.0)
        await store.put("k", b"1", lease)
        await store.put("k", b"2")
        await store.revoke(lease)
        item = await store.get("k")
        assert item is not None
        assert item.value == b"2"

    play(scenario)


def test_revoke_deletes_at_once_and_may_be_repeated(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        lease = await store.grant(60.0)
        await store.put("k", b"1", lease)
        await store.revoke(lease)
        assert await store.get("k") is None
        await store.revoke(lease)

    play(scenario)


def test_a_watch_resumes_from_a_revision_without_gap_or_repeat(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        await store.put("m/a", b"1")
        listing = await store.list("m/")
        await store.put("m/a", b"2")
        await store.put("other", b"2")
        await store.delete("m/a")
        events = await take(store.watch("m/", listing.revision + 1), 2)
        assert events == [
            Put(KeyValue("m/a", b"2", listing.revision + 1)),
            Deleted("m/a", listing.revision + 3),
        ]
        again = await take(store.watch("m/", listing.revision + 2), 1)
        assert again == events[1:]

    play(scenario)


def test_a_watch_sees_what_comes_later_and_all_keys_of_a_transaction(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        start = (await store.list("")).revision + 1
        waiting = asyncio.ensure_future(take(store.watch("", start), 3))
        await asyncio.sleep(0)
        await store.compare_and_swap({"generation": b"1", "job": b"1"}, {"generation": 0})
        await store.put("later", b"1")
        events = await waiting
        assert [event.mod_revision for event in events] == [start, start, start + 1]
        assert {e.item.key for e in events if isinstance(e, Put)} == {"generation", "job", "later"}

    play(scenario)


def test_a_watch_sees_the_end_of_a_lease(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        lease = await store.grant(2.0)
        revision = await store.put("members/a", b"1", lease)
        waiting = asyncio.ensure_future(take(store.watch("members/", revision + 1), 1))
        await asyncio.sleep(0)
        await harness.run_out(lease)
        assert await waiting == [Deleted("members/a", revision + 1)]

    play(scenario)


def test_compaction_ends_a_watch_that_is_behind_and_a_new_list_goes_on(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        for value in (b"1", b"2", b"3"):
            revision = await store.put("k", value)
        await harness.compact(revision - 1)
        with pytest.raises(CompactedError, match="list again") as caught:
            await take(store.watch("k", revision - 1), 1)
        assert caught.value.compact_revision == revision
        assert (await take(store.watch("k", revision), 1))[0].mod_revision == revision
        listing = await store.list("k")
        assert listing.items[0].value == b"3"

    play(scenario)


def test_a_watch_that_kept_up_survives_compaction(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        revision = await store.put("k", b"1")
        watch = store.watch("k", revision)
        await take(watch, 1)
        await harness.compact(revision)
        await store.put("k", b"2")
        assert (await take(watch, 1))[0].mod_revision == revision + 1

    play(scenario)


def test_close_ends_watches_and_refuses_requests(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store

        async def follow() -> list[WatchEvent]:
            return [event async for event in store.watch("", 1)]

        waiting = asyncio.ensure_future(follow())
        await asyncio.sleep(0)
        await store.close()
        assert await waiting == []
        with pytest.raises(StoreUnavailableError, match="closed"):
            await store.get("k")

    play(scenario)


def test_embedded_lease_ends_by_itself_while_somebody_watches() -> None:
    async def scenario() -> None:
        store = EmbeddedStore()
        lease = await store.grant(0.01)
        revision = await store.put("k", b"1", lease)
        assert await take(store.watch("k", revision + 1), 1) == [Deleted("k", revision + 1)]

    asyncio.run(asyncio.wait_for(scenario(), BOUND_S))


def test_embedded_history_is_bounded() -> None:
    async def scenario() -> None:
        store = EmbeddedStore(history=4)
        for _ in range(10):
            revision = await store.put("k", b"1")
        with pytest.raises(CompactedError):
            await take(store.watch("k", 1), 1)
        assert len(await take(store.watch("k", revision - 3), 4)) == 4

    asyncio.run(asyncio.wait_for(scenario(), BOUND_S))


def test_a_listing_and_a_watch_can_end_before_a_key(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        store = harness.store
        for key in ("j/job", "j/members/a", "j/members/ab", "j/members/b", "j/z"):
            await store.put(key, b"1")
        listing = await store.list("j/", end="j/members/")
        assert [item.key for item in listing.items] == ["j/job"]
        own = await store.list("j/members/a", end="j/members/a\0")
        assert [item.key for item in own.items] == ["j/members/a"]
        watch = store.watch("j/", listing.revision + 1, end="j/members/")
        for key in ("j/members/a", "j/z", "j/job"):
            await store.put(key, b"2")
        assert await take(watch, 1) == [Put(KeyValue("j/job", b"2", listing.revision + 3))]

    play(scenario)
