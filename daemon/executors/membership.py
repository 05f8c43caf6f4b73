"""This node in the membership store: its lease and record, the view of the others, and the writes
of the leader.

Every write that matters is a transaction that compares what the decision was taken from. What was
written comes back through the watch, like everybody else's writes, and only then becomes an event.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
import structlog

from rallypoint.daemon.core.events import (
    JobChanged,
    JobSeen,
    LeaderElected,
    LeaderEvent,
    LeaderLost,
    LeaseKept,
    MembersChanged,
    NodeEvent,
    PlanChanged,
    PlanSeen,
    PublishRefused,
)
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import CompactedError, LeaseExpiredError, StoreError
from rallypoint.daemon.executors.store import KeyValue, Lease, MembershipStore, Put, WatchEvent
from rallypoint.daemon.shared.plan import Plan

_KEEPALIVE_S: Final = 1.0
_ATTEMPTS: Final = 5

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass
class View:
    """What the store says, as of the last change that was seen."""

    members: dict[str, MemberRecord] = field(default_factory=dict)
    plan: Plan | None = None
    job: JobRecord | None = None
    leader: str | None = None


class Membership:
    """``emit`` takes the events of both machines, from the event loop."""

    def __init__(
        self,
        store: MembershipStore,
        job_name: str,
        node: str,
        *,
        detect_s: float,
        newest_generation: int,
        emit: Callable[[NodeEvent | LeaderEvent], None],
    ) -> None:
        self.view = View()
        self._store = store
        self._prefix = f"/rallypoint/{job_name}/"
        self._node = node
        self._detect_s = detect_s
        self._newest_generation = newest_generation
        self._emit = emit
        self._lease: Lease | None = None
        self._record: MemberRecord | None = None
        self._leads = False
        self._renewing = asyncio.Lock()
        self._revision = 0
        """Revision that the view was read at, or of the last change taken."""

    # --- life ---------------------------------------------------------------------------------

    async def join(self, job: JobRecord, plan: Plan | None = None) -> None:
        """Take a lease, write the job (and the plan it goes on from) if none is there yet, and try to
        lead."""
        self._hold(await self._store.grant(self._detect_s))
        puts, compare = {self._job: _encode(job)}, {self._job: 0}
        if plan is not None:
            puts[self._generation], compare[self._generation] = _encode(plan), 0
        await self._store.compare_and_swap(puts, compare)
        await self._read_all()
        await self._campaign()

    async def follow(self) -> None:
        """Turn changes of the store into events, without end."""
        while True:
            try:
                async for event in self._store.watch(self._prefix, self._revision + 1):
                    self._revision = event.mod_revision
                    await self._take(event)
                return  # the store was closed
            except CompactedError as error:
                _log.warning("store_watch_restarted", reason=str(error))
                await self._read_all()

    async def keep_lease(self) -> None:
        """Renew the lease, without end; a lost one is replaced and our keys are written again."""
        while True:
            await asyncio.sleep(min(_KEEPALIVE_S, self._detect_s / 3))
            lease = self._require_lease()
            try:
                renewed = await self._store.keepalive(lease)
            except LeaseExpiredError:
                await self._renew(lease)
            else:
                if self._lease is lease:
                    self._hold(renewed)

    async def leave(self) -> None:
        """Give up the lease: our keys go at once instead of after ``detect_s``."""
        if self._lease is not None:
            await self._store.revoke(self._lease)
        await self._store.close()

    # --- writes ---------------------------------------------------------------------------------

    async def write_member(self, record: MemberRecord) -> None:
        """Write this node's record under its lease."""
        self._record = record
        lease = self._require_lease()
        try:
            await self._store.put(self._member, _encode(record), lease)
        except LeaseExpiredError:
            await self._renew(lease)

    async def publish(self, plan: Plan, replaces: int) -> bool:
        """Write a plan if ``replaces`` (0: none) is still the newest. Whether it was written; a
        refusal also becomes an event."""
        for _ in range(_ATTEMPTS):
            current = await self._store.get(self._generation)
            job_item = await self._store.get(self._job)
            newest = 0 if current is None else _decode(current, Plan).generation
            if newest != replaces:
                why = f"generation {newest} is the newest, not {replaces}"
                self._emit(PublishRefused(plan.generation, why))
                return False
            puts = {self._generation: _encode(plan)}
            compare = {self._generation: _revision(current)}
            if plan.restore and job_item is not None:
                job = _decode(job_item, JobRecord)
                job = msgspec.structs.replace(job, restore_generation=plan.generation)
                puts[self._job] = _encode(job)
                compare[self._job] = job_item.mod_revision
            if (await self._store.compare_and_swap(puts, compare)).succeeded:
                return True
        self._emit(
            PublishRefused(plan.generation, f"the store changed {_ATTEMPTS} times meanwhile")
        )
        return False

    async def mark_formed(self, generation: int, progress: dict[str, int]) -> bool:
        """Write ``job.formed`` (and the progress) if this generation is still the newest plan."""
        for _ in range(_ATTEMPTS):
            current = await self._store.get(self._generation)
            if current is None or _decode(current, Plan).generation != generation:
                return False
            compare = {self._generation: current.mod_revision}
            if await self._write_job(compare, formed=generation, **progress):
                return True
        return False

    async def record_checkpoint(
        self, checkpoint: tuple[int, int], progress: dict[str, int]
    ) -> None:
        """Write the newest verified checkpoint into the job record, with the progress."""
        iteration = max(checkpoint[1], progress["iteration"])
        await self.update_job(**{**progress, "iteration": iteration, "checkpoint": checkpoint})

    async def update_job(self, **changes: Any) -> None:
        """Change fields of the job record."""
        for _ in range(_ATTEMPTS):
            if await self._write_job({}, **changes):
                return
        _log.error("job_record_not_written", changes=sorted(changes), attempts=_ATTEMPTS)

    async def read_job(self) -> JobRecord | None:
        """The job record as of now."""
        item = await self._store.get(self._job)
        return None if item is None else _decode(item, JobRecord)

    async def _write_job(self, compare: dict[str, int], **changes: Any) -> bool:
        item = await self._store.get(self._job)
        if item is None:
            return False
        old = _decode(item, JobRecord)
        new = msgspec.structs.replace(old, **changes)
        if new == old and not compare:
            return True
        swapped = await self._store.compare_and_swap(
            {self._job: _encode(new)}, {**compare, self._job: item.mod_revision}
        )
        return swapped.succeeded

    # --- reads ----------------------------------------------------------------------------------

    async def _read_all(self) -> None:
        """Read everything anew, and say it."""
        listing = await self._store.list(self._prefix)
        self._revision = listing.revision
        self.view = View()
        for item in listing.items:
            self._see(item.key, item)
        self._say(members=True, plan=True, job=True)

    async def _take(self, event: WatchEvent) -> None:
        item = event.item if isinstance(event, Put) else None
        key = event.item.key if isinstance(event, Put) else event.key
        if item is None and key == self._member and self._record is not None:
            await self._ensure_lease()  # ours ended (a long pause), but we are still here
            return
        self._see(key, item)
        if item is None and key == self._leader:
            await self._ensure_lease()
            if await self._store.get(self._leader) is None:
                self._depose()
                await self._campaign()
            return
        self._say(
            members=key.startswith(self._members),
            plan=key == self._generation,
            job=key == self._job,
        )

    def _see(self, key: str, item: KeyValue | None) -> None:
        view = self.view
        if key.startswith(self._members):
            node = key.removeprefix(self._members)
            if item is None:
                view.members.pop(node, None)
            else:
                view.members[node] = _decode(item, MemberRecord)
        elif key == self._leader:
            view.leader = None if item is None else item.value.decode()
        elif key == self._generation and item is not None:
            view.plan = _decode(item, Plan)
        elif key == self._job and item is not None:
            view.job = _decode(item, JobRecord)

    def _say(self, *, members: bool = False, plan: bool = False, job: bool = False) -> None:
        view = self.view
        if plan and view.plan is not None:
            self._emit(PlanSeen(view.plan))
        if job and view.job is not None:
            self._emit(JobSeen(view.job))
        if not self._leads:
            return
        if members:
            self._emit(MembersChanged(self._sorted_members()))
        if plan and view.plan is not None:
            self._emit(PlanChanged(view.plan))
        if job and view.job is not None:
            self._emit(JobChanged(view.job))

    # --- leading --------------------------------------------------------------------------------

    async def _campaign(self) -> None:
        lease = self._require_lease()
        won = await self._store.compare_and_swap(
            {self._leader: self._node.encode()}, {self._leader: 0}, lease
        )
        if not won.succeeded:
            return
        self._leads = True
        self.view = View()
        for item in (await self._store.list(self._prefix)).items:
            self._see(item.key, item)
        view = self.view
        if view.job is None:
            raise StoreError(
                f"{self._job} is gone from the membership store; it was written at join"
            )
        members = self._sorted_members()
        known = [self._newest_generation, 0 if view.plan is None else view.plan.generation]
        for member in members:
            for slot in member.slots:
                known += [slot.last_formed, slot.checkpoint[0] if slot.checkpoint else 0]
        self._emit(LeaderElected(members, view.plan, view.job, max(known)))

    def _depose(self) -> None:
        if self._leads:
            self._leads = False
            self._emit(LeaderLost())

    async def _ensure_lease(self) -> None:
        lease = self._require_lease()
        try:
            await self._store.keepalive(lease)
        except LeaseExpiredError:
            await self._renew(lease)

    async def _renew(self, lost: Lease) -> None:
        """Replace a lost lease and write our keys again, once, whoever noticed first."""
        async with self._renewing:
            if self._lease is not lost:
                return
            _log.warning("lease_lost", reason=f"lease {lost.id} is over; taking a new one")
            self._depose()
            lease = await self._store.grant(self._detect_s)
            if self._record is not None:
                await self._store.put(self._member, _encode(self._record), lease)
            self._hold(lease)
            await self._campaign()

    # --- small ----------------------------------------------------------------------------------

    def _hold(self, lease: Lease) -> None:
        self._lease = lease
        self._emit(LeaseKept(lease.deadline_s))

    def _sorted_members(self) -> tuple[MemberRecord, ...]:
        return tuple(self.view.members[node] for node in sorted(self.view.members))

    def _require_lease(self) -> Lease:
        if self._lease is None:
            raise StoreError(f"node {self._node} has not joined the membership store yet")
        return self._lease

    @property
    def _members(self) -> str:
        return f"{self._prefix}members/"

    @property
    def _member(self) -> str:
        return f"{self._members}{self._node}"

    @property
    def _leader(self) -> str:
        return f"{self._prefix}leader"

    @property
    def _generation(self) -> str:
        return f"{self._prefix}generation"

    @property
    def _job(self) -> str:
        return f"{self._prefix}job"


def _encode(record: Plan | JobRecord | MemberRecord) -> bytes:
    return msgspec.json.encode(record)


def _decode(item: KeyValue, kind: type[T]) -> T:
    return msgspec.json.decode(item.value, type=kind)


def _revision(item: KeyValue | None) -> int:
    return 0 if item is None else item.mod_revision
