"""What the leader writes: plans, formed marks, the job. Each is a transaction that also compares the
leader's own key, so that a leader that was replaced meanwhile writes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from rallypoint.daemon.core.permission import from_scratch_refusal
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.executors.membershipview import Keys, decode, decode_plan_in, encode
from rallypoint.daemon.executors.store import KeyValue, MembershipStore
from rallypoint.daemon.shared.plan import Plan

_ATTEMPTS: Final = 5

_NO_LEADER: Final = "this node does not lead any more"
_CHANGED: Final = f"the store changed {_ATTEMPTS} times meanwhile"

ChangeJob = Callable[[JobRecord], JobRecord]


@dataclass(frozen=True)
class LeaderWrites:
    """``lead`` gives the revision at which this node became the leader; 0: it does not lead."""

    store: MembershipStore
    keys: Keys
    lead: Callable[[], int]

    async def publish(self, plan: Plan, replaces: int) -> str:
        """Write a plan if ``replaces`` (0: none) is still the newest. Why it was not, else ""."""
        keys = self.keys
        for _ in range(_ATTEMPTS):
            lead = self.lead()
            if not lead:
                return _NO_LEADER
            current, job_item = await self.store.get(keys.generation), None
            newest = 0 if current is None else decode_plan_in(current).generation
            if newest != replaces:
                return f"generation {newest} is the newest, not {replaces}"
            puts = {keys.generation: encode(plan)}
            compare = {keys.leader: lead, keys.generation: current.mod_revision if current else 0}
            if plan.restore:
                job_item = await self.store.get(keys.job)
            if job_item is not None:
                job = decode(job_item, JobRecord)
                if why := from_scratch_refusal(plan, job):
                    return why
                job = msgspec.structs.replace(job, restore_generation=plan.generation)
                puts[keys.job] = encode(job)
                compare[keys.job] = job_item.mod_revision
            if (await self.store.compare_and_swap(puts, compare)).succeeded:
                return ""
        return _CHANGED

    async def mark_formed(self, generation: int, progress: dict[str, int]) -> str:
        """Write ``job.formed`` and the progress if this is the newest plan. Why not, else ""."""
        keys = self.keys
        for _ in range(_ATTEMPTS):
            lead = self.lead()
            if not lead:
                return _NO_LEADER
            current, item = await self.store.get(keys.generation), await self.store.get(keys.job)
            if current is None or decode_plan_in(current).generation != generation:
                return "it is not the newest plan any more"
            if item is not None and await self.swap_job(
                item,
                lambda job: msgspec.structs.replace(job, formed=generation, **progress),
                {keys.leader: lead, keys.generation: current.mod_revision},
            ):
                return ""
        return _CHANGED

    async def wish(self, change: ChangeJob) -> None:
        """Write what an operator asked for into the job record, from any node: the leader acts on it."""
        written = False
        while not written:  # again, when somebody changed the record meanwhile
            item = await self.store.get(self.keys.job)
            written = item is None or await self.swap_job(item, change, {})

    async def update_job(self, change: ChangeJob) -> bool:
        """Change the job record; False when it or the leader changed meanwhile."""
        item, lead = await self.store.get(self.keys.job), self.lead()
        return item is None or await self.swap_job(item, change, {self.keys.leader: lead})

    async def swap_job(self, item: KeyValue, change: ChangeJob, compare: dict[str, int]) -> bool:
        """Write the changed job over ``item`` while that and ``compare`` hold."""
        old = decode(item, JobRecord)
        new = change(old)
        if new == old and not compare:
            return True
        compare = {**compare, self.keys.job: item.mod_revision}
        return (await self.store.compare_and_swap({self.keys.job: encode(new)}, compare)).succeeded
