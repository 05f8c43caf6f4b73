"""This node in the membership store: its lease and record, the view of the others, and the writes
of the leader.

Every write that matters is a transaction that compares what the decision was taken from. What was
written comes back through the watch, like everybody else's writes, and only then becomes an event.
The store may be a server that does not answer: nothing here waits for it but the tasks that exist
for that, and each tries again until it does.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from rallypoint.daemon.core.events import (
    JobChanged,
    JobSeen,
    LeaderElected,
    LeaderEvent,
    LeaderLost,
    MembersChanged,
    NodeEvent,
    PlanChanged,
    PlanSeen,
    PublishRefused,
)
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import (
    CompactedError,
    LeaseExpiredError,
    StoreError,
    StoreUnavailableError,
)
from rallypoint.daemon.executors.entering import Admit, Entering
from rallypoint.daemon.executors.following import Paced, follow
from rallypoint.daemon.executors.leaderwrites import ChangeJob, LeaderWrites
from rallypoint.daemon.executors.leasekeeper import LeaseKeeper
from rallypoint.daemon.executors.membershipview import Keys, View, decode, encode
from rallypoint.daemon.executors.neighbours import Neighbours
from rallypoint.daemon.executors.patience import Patience
from rallypoint.daemon.executors.store import (
    KeyValue,
    Lease,
    Listing,
    MembershipStore,
    Put,
    WatchEvent,
)
from rallypoint.daemon.shared.plan import Plan

_CONFLICT_S: Final = 0.05
_PACE_S: Final = 5e-5
"""For each member, between two decisions about all of them: several times what one takes."""

_log = structlog.get_logger(__name__)


class Membership:
    """``emit`` takes the events of both machines, from the event loop. After `join`, `follow`,
    `relist`, `keep_lease` and `tend` must run."""

    def __init__(
        self,
        store: MembershipStore,
        job_name: str,
        node: str,
        *,
        detect_s: float,
        relist_s: float,
        newest_generation: int,
        bind: str | None = None,
        emit: Callable[[NodeEvent | LeaderEvent], None],
        agreed: bytes = b"{}",
        admit: Admit = lambda stored, *, agreed, others: stored,
    ) -> None:
        self._keys = Keys(job_name, node)
        self.view = View(self._keys)
        self.neighbours = Neighbours(
            store,
            self._keys,
            lambda: self.view,
            lambda: self._lead > 0,
            bind=bind,
            probe_s=min(0.2, detect_s / 10),
        )
        self._store = store
        self._relist_s = relist_s
        self._newest_generation = newest_generation
        self._emit = emit
        self._record: MemberRecord | None = None
        self._stale = False
        """Whether the store does not hold our newest record."""
        self._written = 0
        """Revision of the newest write of our record that was acknowledged."""
        self._stir = asyncio.Event()
        self._lead = 0
        """Revision at which we became the leader; 0: we do not lead."""
        self._lead_changed = asyncio.Event()
        self._leader_gone = 0
        """Revision at which a leader was elected whose supervisor was seen to be gone."""
        self._listed = 0
        """Revision of the newest listing: changes up to it are known."""
        self._revision = 0
        """Revision of the newest change that is known."""
        self._writes = LeaderWrites(store, self._keys, lambda: self._lead)
        self._members_said = Paced(self._say_members)
        self._entering = Entering(store, self._keys, self._writes, agreed, admit)
        self._writing = asyncio.Lock()
        """One write of the leader at a time, in the order in which they were decided."""
        self.patience = Patience()
        """What is asked of the store, and what stands in its way."""
        ends = {"lost": self._depose, "replaced": self._lease_replaced}
        self._lease = LeaseKeeper(store, node, detect_s, self.patience, emit, **ends)
        self.joined = False

    # --- life ---------------------------------------------------------------------------------

    async def join(self, job: JobRecord, plans: Sequence[Plan] = ()) -> None:
        """Take a lease, write the job (and the last of ``plans``, from which it goes on) if none is there
        yet, and try to lead. Waits for a store that does not answer. Of a job that is there already
        ``admit`` says how it goes on; what it raises is raised."""
        await self.neighbours.open()
        while not self.joined:
            try:
                await self._join(job, plans)
                self.joined = True
            except StoreUnavailableError as error:
                await self.patience.pause_after("join", error)
        self.patience.done("join")

    async def _join(self, job: JobRecord, plans: Sequence[Plan]) -> None:
        lease = await self._lease.take()
        await self._entering.enter(job, plans)
        await self._read_all(earlier=plans)
        await self._campaign(lease)

    async def follow(self) -> None:
        """Turn changes of the store into events, without end."""
        while True:
            self._lead_changed.clear()
            spans, begin = self._keys.followed(leads=self._lead > 0), self._listed + 1
            try:
                if not await follow(self._store, spans, begin, self._take, self._lead_changed):
                    return  # the store was closed
                if self._lead:
                    continue  # everything was read when we were elected
            except CompactedError as error:
                _log.warning("store_watch_restarted", reason=str(error))
            except StoreError as error:
                await self.patience.pause_after("watch", error)
            await self.patience.until_done("watch", self._read_all)

    async def relist(self) -> None:
        """Compare what we know with a listing, rarely, without end: a change that the watch did not bring
        is seen then."""
        while True:
            await asyncio.sleep(self._relist_s)
            await self.patience.until_done("listing", self._compare)

    async def _compare(self) -> None:
        lead = self._lead
        listing = await self._list(everything=lead > 0)
        await asyncio.sleep(self._relist_s / 60)  # what is on its way is not lost
        await self.neighbours.refresh()
        if lead != self._lead or self._lead_changed.is_set():
            return  # everything is being read anew
        rewritten = self._keys.member if self._stale else ""
        missed = [key for key in self.view.missed(listing) if key != rewritten]
        if missed:
            _log.warning("watch_event_lost", keys=missed, reason="listed, but never watched")
            await self._read_all()

    async def keep_lease(self) -> None:
        """Renew the lease, without end; a lost one is replaced and our keys are written again."""
        await self._lease.keep()

    async def tend(self) -> None:
        """Keep our record in the store, and lead when nobody does, without end."""
        while True:
            await self._stir.wait()
            self._stir.clear()
            await self.patience.until_done("own keys", self._tend_once)

    async def doubt_leader(self) -> None:
        """Somebody is lost: is it the leader? When its supervisor is gone, its key is taken over without
        waiting for its lease. Should it live all the same, its writes are refused from then on."""
        gone = 0 if self._lead else await self.neighbours.leader_gone()
        if gone:
            _log.warning("leader_gone", reason="a worker is lost, and the leader's port is closed")
            self._leader_gone = gone
            self._stir.set()

    async def leave(self) -> None:
        """Give up the lease: our keys go at once instead of after ``detect_s``."""
        self.neighbours.close()
        await self._lease.give_back()
        await self._store.close()

    # --- writes ---------------------------------------------------------------------------------

    def set_member(self, record: MemberRecord) -> None:
        """This node's record, to be written under its lease by `tend`; of several only the newest."""
        self._record, self._stale = record, True
        self._stir.set()

    async def publish(self, plan: Plan, replaces: int) -> bool:
        """Write a plan if ``replaces`` (0: none) is still the newest, and we lead. Whether it was
        written; a refusal also becomes an event."""
        return await self._or_refused(plan.generation, self._writes.publish(plan, replaces))

    async def mark_formed(self, generation: int, progress: dict[str, int]) -> bool:
        """Write ``job.formed`` (and the progress) if this generation is still the newest plan, and we
        lead. Whether it was written; a refusal also becomes an event."""
        return await self._or_refused(generation, self._writes.mark_formed(generation, progress))

    async def update_job(self, **changes: Any) -> None:
        """Change fields of the job record, as soon as the store answers, while we lead."""

        async def change() -> None:
            while self._lead:
                if await self._writes.update_job(
                    lambda job: msgspec.structs.replace(job, **changes)
                ):
                    return
                await asyncio.sleep(_CONFLICT_S)  # the watch may say that we lead no more

        async with self._writing:
            await self.patience.until_done("job record", change)

    async def wish(self, change: ChangeJob) -> None:
        """Write an operator's wish into the job record, as soon as the store answers."""
        await self.patience.until_done("wish", lambda: self._writes.wish(change))

    async def read_job(self) -> JobRecord | None:
        """The job record as of now."""
        item = await self._store.get(self._keys.job)
        return None if item is None else decode(item, JobRecord)

    async def _or_refused(self, generation: int, work: Coroutine[Any, Any, str]) -> bool:
        """Do ``work``, which gives the reason of a refusal, or ""."""
        try:
            async with self._writing:
                why = await work
        except StoreError as error:
            why = str(error)
        if why:
            self._emit(PublishRefused(generation, why))
        return not why

    # --- reads ----------------------------------------------------------------------------------

    async def _read_all(self, elected: int = 0, earlier: Sequence[Plan] = ()) -> None:
        """Read everything anew, and say it. ``elected``: the revision at which we became leader;
        ``earlier``: plans of before, which the store holds no more."""
        everything = bool(elected or self._lead)
        listing = await self._list(everything=everything)
        # Again, where a watch was faster, or we were elected meanwhile.
        while listing.revision < self._revision or (self._lead and not everything):
            everything = bool(elected or self._lead)
            listing = await self._list(everything=everything)
        before, self.view = self.view, View.of(self._keys, listing, self.view)
        self._listed = self._revision = listing.revision
        self.neighbours.changed()
        view = self.view
        if self._lead_is(elected):
            self._lead = elected
            self._lead_changed.set()
        elif not self._lead_is(self._lead):
            self._depose()
        self._stale |= self._record is not None and self._keys.node not in view.members
        self._stir.set()
        newest = 0 if view.plan is None else view.plan.generation
        for plan in earlier:
            if plan.generation < newest:
                self._emit(PlanSeen(plan))
        self._say_to_node(plan=view.plan != before.plan, job=view.job != before.job)
        if not self._lead:
            return
        if elected:
            if view.job is None:
                raise StoreError(f"{self._keys.job} is gone from the store; join wrote it")
            newest = max(self._newest_generation, view.newest_generation())
            self._emit(LeaderElected(view.sorted_members(), view.plan, view.job, newest))
        else:
            self._say_to_leader(members=True, plan=True, job=True)

    async def _list(self, *, everything: bool) -> Listing:
        """All keys that are followed."""
        keys = self._keys
        if everything:
            return await self._store.list(keys.prefix)
        listing = await self._store.list(keys.prefix, end=keys.members)
        own = await self._store.get(keys.member)
        return listing if own is None else Listing(listing.revision, (*listing.items, own))

    def _take(self, event: WatchEvent) -> None:
        item = event.item if isinstance(event, Put) else None
        key = event.item.key if isinstance(event, Put) else event.key
        if event.mod_revision <= max(self._listed, self.view.revisions.get(key, 0)):
            return
        self._revision = max(self._revision, event.mod_revision)
        if not self._lead and key.startswith(self._keys.members) and key != self._keys.member:
            return  # we led until just now
        if key == self._keys.member and self._differs(item):
            self._stale = True
            self._stir.set()
            if item is None:
                return  # our lease ended (a long pause), but we are still here
        self.view.see(key, item)
        self.neighbours.changed()
        if key == self._keys.leader:
            if not self._lead_is(self._lead):
                self._depose()
            self._stir.set()
        facts = {"plan": key == self._keys.generation, "job": key == self._keys.job}
        self._say_to_node(**facts)
        if self._lead:
            self._say_to_leader(members=key.startswith(self._keys.members), **facts)

    def _differs(self, item: KeyValue | None) -> bool:
        """Whether somebody else, or a late request of ours, changed our record behind our back."""
        if self._record is None:
            return False
        if item is None:
            return True
        return item.mod_revision > self._written and item.value != encode(self._record)

    def _say_to_node(self, *, plan: bool, job: bool) -> None:
        if plan and self.view.plan is not None:
            self._emit(PlanSeen(self.view.plan))
        if job and self.view.job is not None:
            self._emit(JobSeen(self.view.job))

    def _say_members(self) -> float:
        """To the leader; for how long it then may leave further changes."""
        if self._lead:
            self._emit(MembersChanged(self.view.sorted_members()))
        return _PACE_S * len(self.view.members)

    def _say_to_leader(self, *, members: bool, plan: bool, job: bool) -> None:
        if members:
            self._members_said.stir()
        if plan and self.view.plan is not None:
            self._emit(PlanChanged(self.view.plan))
        if job and self.view.job is not None:
            self._emit(JobChanged(self.view.job))

    # --- our keys -------------------------------------------------------------------------------

    async def _tend_once(self) -> None:
        lease = self._lease.require()
        try:
            while self._stale and self._record is not None:
                record, self._stale = self._record, False
                try:
                    self._written = await self._store.put(self._keys.member, encode(record), lease)
                except StoreError:
                    self._stale = True
                    raise
            await self._campaign(lease)
        except LeaseExpiredError:
            await self._lease.replace(lease)

    async def _campaign(self, lease: Lease) -> None:
        """Become the leader if nobody is, or an earlier life of this node, or one that is gone; also when
        an earlier try did so and its answer got lost."""
        key, leader = self._keys.leader, self.view.leader
        me, replaces = self._keys.node.encode(), 0
        if leader is not None and leader.lease_id != lease.id:
            # One without a lease was put by hand, and would lead for ever.
            held = leader.lease_id and leader.mod_revision != self._leader_gone
            if leader.value != me and held:
                return
            replaces = leader.mod_revision
        if self._lead:
            return
        swapped = await self._store.compare_and_swap({key: me}, {key: replaces}, lease)
        now = swapped.current[key]
        if now is not None and now.lease_id == lease.id:
            await self._read_all(elected=now.mod_revision)

    def _lease_replaced(self) -> None:
        """Our keys went with the lease; `tend` writes them again."""
        self._stale = self._record is not None
        self._stir.set()

    # --- small ----------------------------------------------------------------------------------

    def _depose(self) -> None:
        if self._lead:
            self._lead = 0
            self._lead_changed.set()
            self.view.forget_others()
            self._emit(LeaderLost())

    def _lead_is(self, revision: int) -> bool:
        leader = self.view.leader
        return revision > 0 and leader is not None and leader.mod_revision == revision
