"""This node in the store: what is written is compared, and what changes becomes events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from rallypoint.daemon.core import events
from rallypoint.daemon.core.records import JobRecord, MemberRecord, SlotRecord
from rallypoint.daemon.executors.embedded import EmbeddedStore
from rallypoint.daemon.executors.membership import Membership
from rallypoint.daemon.executors.membershipview import Keys, View, encode
from rallypoint.daemon.executors.store import Put, WatchEvent
from rallypoint.daemon.shared.errors import ConfigError
from tests.fakes.facts import A, B, plan

LOOPBACK = "127.0.0.1"
JOB = JobRecord(uid="u", config_hash="h", versions={})


def record(node: str = "local", last_formed: int = 0) -> MemberRecord:
    slot = SlotRecord(slot=0, incarnation=1, state="ready", last_formed=last_formed)
    return MemberRecord(node=node, incarnation=1, advertise="127.0.0.1", slots=(slot,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ForgetfulStore(EmbeddedStore):
    """Its watches leave out changes of the keys in ``unseen``, as they were to come."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.unseen: set[str] = set()
        self.lost: list[str] = []

    async def watch(
        self, prefix: str, from_revision: int, *, end: str = ""
    ) -> AsyncIterator[WatchEvent]:
        async for event in super().watch(prefix, from_revision, end=end):
            key = event.item.key if isinstance(event, Put) else event.key
            if key in self.unseen:
                self.lost.append(key)
            else:
                yield event


class Node:
    """One node with its store, and the events that it was told."""

    def __init__(self, store: EmbeddedStore, name: str = "local", bind: str | None = None) -> None:
        self.events: list[Any] = []
        self._arrived = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.membership = Membership(
            store,
            "default",
            name,
            detect_s=5.0,
            relist_s=0.06,
            newest_generation=3,
            bind=bind,
            emit=self._take,
        )

    def _take(self, event: object) -> None:
        self.events.append(event)
        self._arrived.set()

    async def wait_for(self, kind: type) -> Any:
        """The first event of this kind, removed with what came before it."""
        async with asyncio.timeout(10):
            while True:
                while self.events:
                    event = self.events.pop(0)
                    if isinstance(event, kind):
                        return event
                self._arrived.clear()
                await self._arrived.wait()


def on_store(use: Callable[[EmbeddedStore, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        store = EmbeddedStore(clock)
        tasks_before = asyncio.all_tasks()
        try:
            await use(store, clock)
        finally:
            await store.close()
            for task in asyncio.all_tasks() - tasks_before:
                task.cancel()

    asyncio.run(run())


async def joined(store: EmbeddedStore, name: str = "local", bind: str | None = None) -> Node:
    node = Node(store, name, bind)
    await node.membership.join(JOB)
    for work in (node.membership.follow(), node.membership.tend()):
        node.tasks.append(asyncio.create_task(work))
    return node


def test_the_first_node_leads_and_knows_the_newest_number() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        elected = await node.wait_for(events.LeaderElected)
        assert (elected.job, elected.plan, elected.newest_known_generation) == (JOB, None, 3)
        node.membership.set_member(record(last_formed=9))
        assert (await node.wait_for(events.MembersChanged)).members == (record(last_formed=9),)

    on_store(use)


def test_only_the_leader_follows_the_records_of_others() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second, third = [await joined(store, name) for name in ("local", "other", "third")]
        for node, name in ((second, "other"), (third, "third")):
            node.membership.set_member(record(name))
        while len((await first.wait_for(events.MembersChanged)).members) < 2:
            pass
        await first.membership.publish(plan(4, A), 0)
        for node in (second, third):
            await node.wait_for(events.PlanSeen)
            assert set(node.membership.view.members) <= {node.membership.view.keys.node}
        neighbours = second.membership.neighbours
        assert (neighbours.records(), neighbours.alone) == ((), False), "somebody else leads"
        assert await neighbours.refresh() == neighbours.records() == (record("third"),)
        assert first.membership.neighbours.live
        assert first.membership.neighbours.records() == (record("other"), record("third"))

    on_store(use)


def test_who_is_elected_follows_all_records_from_then_on_and_no_longer_when_replaced() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second = await _two_with_ports(store)
        there = "/rallypoint/default/members/third"
        await store.put(there, encode(record("third")))
        first.membership.neighbours.close()
        await second.membership.doubt_leader()
        elected = await second.wait_for(events.LeaderElected)
        assert [m.node for m in elected.members] == ["local", "other", "third"]
        await first.wait_for(events.LeaderLost)
        await store.put(there, encode(record("third", last_formed=9)))
        changed = await second.wait_for(events.MembersChanged)
        assert changed.members[-1] == record("third", last_formed=9)
        assert set(first.membership.view.members) == {"local"}
        second.membership.neighbours.close()

    on_store(use)


def test_many_changes_of_records_at_once_are_few_decisions() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        await node.wait_for(events.LeaderElected)
        names = [f"n{number:03d}" for number in range(200)]
        for name in names:
            await store.put(f"/rallypoint/default/members/{name}", encode(record(name)))
        decisions = 1
        while len((await node.wait_for(events.MembersChanged)).members) < len(names):
            decisions += 1
        assert decisions < len(names) / 4

    on_store(use)


def test_a_plan_is_written_only_over_the_one_it_replaces() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        first, second = plan(4, A, restore=True), plan(5, A, B)
        assert await node.membership.publish(first, 0)
        assert (await node.wait_for(events.PlanSeen)).plan == first
        assert not await node.membership.publish(second, 0)
        refused = await node.wait_for(events.PublishRefused)
        assert refused.reason == "generation 4 is the newest, not 0"
        assert await node.membership.publish(second, 4)
        job = await node.membership.read_job()
        assert job is not None
        assert job.restore_generation == 4

    on_store(use)


def test_a_plan_from_scratch_is_refused_where_the_job_holds_progress_by_now() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        await node.membership.update_job(checkpoint=(2, 8), iteration=8)
        assert not await node.membership.publish(plan(4, A, restore=True), 0)
        refused = await node.wait_for(events.PublishRefused)
        assert "would start from scratch" in refused.reason
        assert await node.membership.publish(plan(4, A, restore=True, resumes=True), 0)

    on_store(use)


def test_only_the_newest_plan_is_marked_formed() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        await node.membership.publish(plan(4, A), 0)
        await node.membership.publish(plan(5, A), 4)
        assert not await node.membership.mark_formed(4, {})
        assert await node.membership.mark_formed(5, {"iteration": 7, "env_steps": 70})
        job = await node.membership.read_job()
        assert job is not None
        assert (job.formed, job.iteration, job.env_steps) == (5, 7, 70)

    on_store(use)


def test_a_lost_lease_is_replaced_and_nobody_takes_the_node_for_gone() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        node.membership.set_member(record())
        await node.wait_for(events.MembersChanged)
        clock.now += 60.0  # a long pause of the machine
        await store.get("anything")  # the store notices that the lease is over
        await node.wait_for(events.LeaderLost)
        assert (await node.wait_for(events.LeaseKept)).deadline_s == clock.now + 5.0
        assert (await node.wait_for(events.LeaderElected)).members == (record(),)
        assert not [e for e in node.events if e == events.MembersChanged(())]

    on_store(use)


def test_a_second_node_follows_and_leads_when_the_first_has_gone() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second = await joined(store), await joined(store, "other")
        first.membership.set_member(record())
        second.membership.set_member(record("other"))
        await first.membership.publish(plan(4, A), 0)
        assert (await second.wait_for(events.PlanSeen)).plan == plan(4, A)
        assert not [e for e in second.events if isinstance(e, events.LeaderElected)]
        lease = first.membership._lease.newest
        assert lease is not None
        for task in first.tasks:
            task.cancel()
        await store.revoke(lease)
        elected = await second.wait_for(events.LeaderElected)
        assert elected.members == (record("other"),)
        assert elected.plan == plan(4, A)

    on_store(use)


async def _two_with_ports(store: EmbeddedStore) -> tuple[Node, Node]:
    """A leader and a follower, each with its port open and in its record."""
    first = await joined(store, "local", LOOPBACK)
    await first.wait_for(events.LeaderElected)
    for name in ("local", "other"):
        node = first if name == "local" else await joined(store, name, LOOPBACK)
        port = node.membership.neighbours.port
        node.membership.set_member(msgspec.structs.replace(record(name), port=port))
        await first.wait_for(events.MembersChanged)
    return first, node


def test_a_leader_whose_port_is_closed_is_followed_without_waiting_for_its_lease() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second = await _two_with_ports(store)
        await second.membership.doubt_leader()
        assert not [e for e in second.events if isinstance(e, events.LeaderElected)], "it lives"
        first.membership.neighbours.close()
        await second.membership.doubt_leader()
        elected = await second.wait_for(events.LeaderElected)
        assert [member.node for member in elected.members] == ["local", "other"]
        await first.wait_for(events.LeaderLost)
        assert not await first.membership.publish(plan(4, A), 0), (
            "whoever was replaced writes nothing"
        )
        assert await second.membership.publish(plan(4, A), 0)
        second.membership.neighbours.close()

    on_store(use)


def test_a_leader_that_is_started_again_leads_on_at_once() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second = await _two_with_ports(store)
        first.membership.neighbours.close()  # killed; its keys are still there
        again = await joined(store, "local", LOOPBACK)
        assert await again.wait_for(events.LeaderElected)
        assert await again.membership.publish(plan(4, A), 0)
        assert not [e for e in second.events if isinstance(e, events.LeaderElected)]
        for node in (again, second):
            node.membership.neighbours.close()

    on_store(use)


def test_a_second_supervisor_of_the_same_name_is_refused_while_the_first_lives() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        first, second = await _two_with_ports(store)
        namesake = Node(store, "other", LOOPBACK)
        with pytest.raises(ConfigError, match=r"under the name 'other'.*node\.name of its own"):
            await namesake.membership.join(JOB)
        second.membership.neighbours.close()  # the first one is gone, its record is still there
        await namesake.membership.join(JOB)
        for node in (first, namesake):
            node.membership.neighbours.close()

    on_store(use)


def test_a_watch_that_fell_behind_reads_anew() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        await node.wait_for(events.LeaderElected)
        for _ in range(3000):
            await store.put("/rallypoint/default/members/other", b"{}")
            await store.delete("/rallypoint/default/members/other")
        node.membership.set_member(record())
        while (await node.wait_for(events.MembersChanged)).members != (record(),):
            pass  # what is read anew may come before the record is written

    on_store(use)


@pytest.mark.parametrize("change", ["job", "member", "gone"])
def test_a_change_that_no_watch_brought_is_seen_by_the_next_listing(change: str) -> None:
    async def use() -> None:
        store = ForgetfulStore(Clock())
        try:
            node = await joined(store)
            node.tasks.append(asyncio.create_task(node.membership.relist()))
            there = "/rallypoint/default/members/other"
            await store.put(there, encode(record("other")))
            assert (await node.wait_for(events.MembersChanged)).members == (record("other"),)
            store.unseen = {there, "/rallypoint/default/job"}
            if change == "job":
                assert await node.membership.publish(plan(4, A), 0)
                assert await node.membership.mark_formed(4, {})
                while (await node.wait_for(events.JobSeen)).job.formed != 4:
                    pass
            elif change == "member":
                await store.put(there, encode(record("other", last_formed=9)))
                seen = await node.wait_for(events.MembersChanged)
                assert seen.members == (record("other", last_formed=9),)
            else:
                await store.delete(there)
                assert (await node.wait_for(events.MembersChanged)).members == ()
            assert store.lost
            assert node.membership.view.missed(await store.list("/rallypoint/default/")) == []
        finally:
            await store.close()
            for task in node.tasks:
                task.cancel()

    asyncio.run(use())


def test_a_view_knows_what_it_missed() -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        keys = Keys("default", "local")
        for node in ("a", "b"):
            await store.put(f"{keys.members}{node}", encode(record(node)))
        view = View.of(keys, await store.list(keys.prefix))
        assert view.missed(await store.list(keys.prefix)) == []
        await store.delete(f"{keys.members}a")
        await store.put(keys.job, encode(JOB))
        listing = await store.list(keys.prefix)
        assert view.missed(listing) == [keys.job, f"{keys.members}a"]
        view.see(keys.job, await store.get(keys.job))
        await store.put(f"{keys.members}b", encode(record("b", last_formed=1)))
        view.see(f"{keys.members}b", await store.get(f"{keys.members}b"))  # later than the listing
        assert view.missed(listing) == [f"{keys.members}a"]

    on_store(use)
