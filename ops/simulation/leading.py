"""What a supervisor of the simulation does as the leader, or to become it."""

from __future__ import annotations  # else those of inner functions are evaluated at each call

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import leader, permission
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import LeaseExpiredError
from rallypoint.daemon.executors.keyspace import Keyspace
from rallypoint.daemon.executors.store import KeyValue, Listing, Put, WatchEvent
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.ops.simulation import keys

if TYPE_CHECKING:
    from rallypoint.ops.simulation.node import Node

_CAMPAIGN_S: Final = 0.3

Ask = Callable[[Keyspace, float], str]
Change = Callable[[JobRecord], JobRecord]


class Leading:
    """The leader's machine of one life of a supervisor, and its writes.

    Every write compares the leader key as this node made it, so that nothing of a deposed leader lands.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.leads = False
        self._state = leader.initial(node.cluster.scenario.leader_policy())
        self._members: dict[str, MemberRecord] = {}
        self._leader_revision = 0
        self.members_revision = 0
        """Up to which revision the members are read: their watch begins where the listing ended."""
        self._timer_s: float | None = None
        self._campaigning = False

    # --- becoming the leader, and not being it any more -------------------------------------------

    def campaign(self) -> None:
        """Try to write the leader key; whoever finds it free leads."""
        node, lease = self._node, self._node.lease
        if self.leads or self._campaigning or lease is None:
            return
        self._campaigning = True
        name = node.name.encode()

        def ask(keyspace: Keyspace, _: float) -> tuple[int, Listing]:
            won = keyspace.compare_and_swap({keys.LEADER: name}, {keys.LEADER: 0}, lease)
            item = won.current[keys.LEADER]
            mine = item is not None and item.value == name and item.lease_id == lease.id
            revision = item.mod_revision if mine and item is not None else 0
            return revision, keyspace.list(keys.PREFIX)

        def answer(result: tuple[int, Listing] | LeaseExpiredError | None) -> None:
            self._campaigning = False
            same = node.lease is not None and node.lease.id == lease.id
            if node.lease is not None and not same:
                self.campaign()  # it was asked with the lease before
            elif result is None:
                node.later(_CAMPAIGN_S, self.campaign)
            elif isinstance(result, tuple) and result[0] and same and not self.leads:
                self._elected(*result)

        node.request(ask, answer)

    def _elected(self, revision: int, listing: Listing) -> None:
        found = {item.key: item for item in listing.items}
        self.leads, self._leader_revision = True, revision
        self._node.cluster.leaders.add(self._node)
        self.members_revision = listing.revision
        self._node.cluster.log(f"{self._node.name} leads")
        self._members = _members(found)
        plan = keys.plan_of(found[keys.GENERATION]) if keys.GENERATION in found else None
        newest = max(self._node.newest_used, self._node.state.newest_generation)
        job = keys.job_of(found[keys.JOB])
        self.decide(ev.LeaderElected(self._sorted(), plan, job, newest))
        self._node.pull()

    def lose(self, why: str) -> None:
        """This node does not lead any more."""
        if self.leads:
            self._node.cluster.log(f"{self._node.name} leads no more: {why}")
            self.leads = False
            self._node.cluster.leaders.discard(self._node)
            self._timer_s = None
            self.decide(ev.LeaderLost())

    # --- what is read ------------------------------------------------------------------------------

    def read(self, found: dict[str, KeyValue]) -> None:
        """Everything was read anew."""
        self._see_leader(found.get(keys.LEADER))
        if self.leads:
            self._members = _members(found)
            self.decide(ev.MembersChanged(self._sorted()))
            self._say(found.get(keys.GENERATION), found.get(keys.JOB))

    def take(self, events: Sequence[WatchEvent]) -> None:
        """Changes in the order of their revisions; members that change together are one event."""
        changed = False
        for event in events:
            item = event.item if isinstance(event, Put) else None
            key = event.item.key if isinstance(event, Put) else event.key
            if key.startswith(keys.MEMBERS):
                changed = True
                self._see_member(key.removeprefix(keys.MEMBERS), item)
            elif key == keys.LEADER:
                self._see_leader(item)
            elif item is not None and key == keys.GENERATION:
                self._node.see_plan(keys.plan_of(item))
                self._say(item, None)
            elif item is not None and key == keys.JOB:
                self._node.see_job(keys.job_of(item))
                self._say(None, item)
        if changed and self.leads:
            self.decide(ev.MembersChanged(self._sorted()))

    def _see_member(self, name: str, item: KeyValue | None) -> None:
        if item is None:
            self._members.pop(name, None)
        else:
            self._members[name] = keys.member_of(item)

    def _see_leader(self, item: KeyValue | None) -> None:
        if item is None:
            self.lose("its key is gone")
            self._node.later(self._node.cluster.choose.uniform(0.0, _CAMPAIGN_S), self.campaign)
        elif item.mod_revision > self._leader_revision:
            self.lose(f"{item.value.decode()} leads")

    def _say(self, plan: KeyValue | None, job: KeyValue | None) -> None:
        if self.leads and plan is not None:
            self.decide(ev.PlanChanged(keys.plan_of(plan)))
        if self.leads and job is not None:
            self.decide(ev.JobChanged(keys.job_of(job)))

    # --- decisions ---------------------------------------------------------------------------------

    def decide(self, event: ev.LeaderEvent) -> None:
        """Decide about one event, and carry the orders out."""
        if not self._node.up or not (self.leads or isinstance(event, ev.LeaderLost)):
            return
        self._state, orders = leader.decide(self._state, event, self._node.cluster.clock.now)
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: act.LeaderAction) -> None:
        node = self._node
        match order:
            case act.SetTimer(at_s=at_s):
                self._timer_s = at_s
                delay_s = max(0.0, at_s - node.cluster.clock.now)
                node.later(delay_s, lambda: self._fire(at_s))
            case act.ProbeMembers(probe=number, targets=targets, bound_s=bound_s):
                self._probe(number, targets, bound_s)
            case act.PublishPlan(plan=plan, replaces=replaces):
                node.newest_used = max(node.newest_used, plan.generation)
                self._publish(plan, replaces)
            case act.MarkFormed(generation=generation):
                self._mark(generation)
            case act.RecordCheckpoint(checkpoint=checkpoint):
                self._write_job(lambda job: _with_checkpoint(job, checkpoint))
            case act.SetJobState(state=state, reason=reason):
                node.cluster.checks.job_ends(state, reason)
                self._write_job(
                    lambda job: msgspec.structs.replace(job, state=state, reason=reason)
                )
            case _:
                if node.cluster.trace is not None:
                    node.cluster.log(f"{node.name} as leader, {order.event}: {order.reason}")

    def _fire(self, at_s: float) -> None:
        if self._timer_s == at_s:
            self._timer_s = None
            self.decide(ev.TimerFired())

    def _probe(self, number: int, targets: tuple[WorkerKey, ...], bound_s: float) -> None:
        node = self._node

        def answer() -> None:
            said = [node.cluster.probe(node, key) for key in targets]
            self.decide(
                ev.ProbeAnswered(
                    number,
                    tuple(k for k, a in zip(targets, said, strict=True) if a == "answering"),
                    tuple(k for k, a in zip(targets, said, strict=True) if a == "gone"),
                    tuple(k for k, a in zip(targets, said, strict=True) if a == "silent"),
                )
            )

        node.later(node.cluster.choose.uniform(0.001, bound_s), answer)

    # --- writes ------------------------------------------------------------------------------------

    def _publish(self, plan: Plan, replaces: int) -> None:
        revision = self._leader_revision

        def ask(keyspace: Keyspace, _: float) -> str:
            current, job = keyspace.get(keys.GENERATION), keyspace.get(keys.JOB)
            newest = 0 if current is None else keys.plan_of(current).generation
            if newest != replaces:
                return f"generation {newest} is the newest, not {replaces}"
            puts = {keys.GENERATION: keys.encode(plan)}
            compare = {keys.LEADER: revision, keys.GENERATION: _revision(current)}
            if plan.restore and job is not None:
                record = keys.job_of(job)
                if why := permission.from_scratch_refusal(plan, record):
                    return why
                record = msgspec.structs.replace(record, restore_generation=plan.generation)
                puts[keys.JOB] = keys.encode(record)
            done = keyspace.compare_and_swap(puts, compare).succeeded
            return "" if done else "another node leads"

        self._write(plan.generation, ask)

    def _mark(self, generation: int) -> None:
        revision, iteration = self._leader_revision, self._node.iteration()

        def ask(keyspace: Keyspace, _: float) -> str:
            current, job = keyspace.get(keys.GENERATION), keyspace.get(keys.JOB)
            if current is None or job is None or keys.plan_of(current).generation != generation:
                return "it is not the newest plan any more"
            record = keys.job_of(job)
            record = msgspec.structs.replace(
                record, formed=generation, iteration=max(record.iteration, iteration)
            )
            compare = {keys.LEADER: revision, keys.GENERATION: current.mod_revision}
            done = keyspace.compare_and_swap({keys.JOB: keys.encode(record)}, compare).succeeded
            return "" if done else "another node leads"

        self._write(generation, ask)

    def _write(self, generation: int, ask: Ask) -> None:
        def answer(result: str | LeaseExpiredError | None) -> None:
            if result != "":
                reason = result if isinstance(result, str) else "no answer"
                self.decide(ev.PublishRefused(generation, reason))

        self._node.request(ask, answer)

    def _write_job(self, change: Change) -> None:
        revision = self._leader_revision

        def ask(keyspace: Keyspace, _: float) -> bool:
            item = keyspace.get(keys.JOB)
            if item is None:
                return False
            record = keys.encode(change(keys.job_of(item)))
            compare = {keys.LEADER: revision, keys.JOB: item.mod_revision}
            return keyspace.compare_and_swap({keys.JOB: record}, compare).succeeded

        def answer(result: bool | LeaseExpiredError | None) -> None:
            if result is None and self.leads:
                self._node.later(_CAMPAIGN_S, lambda: self._write_job(change))

        self._node.request(ask, answer)

    def _sorted(self) -> tuple[MemberRecord, ...]:
        return tuple(self._members[name] for name in sorted(self._members))


def _members(found: dict[str, KeyValue]) -> dict[str, MemberRecord]:
    return {
        key.removeprefix(keys.MEMBERS): keys.member_of(item)
        for key, item in found.items()
        if key.startswith(keys.MEMBERS)
    }


def _revision(item: KeyValue | None) -> int:
    return 0 if item is None else item.mod_revision


def _with_checkpoint(job: JobRecord, checkpoint: tuple[int, int]) -> JobRecord:
    newest = checkpoint if job.checkpoint is None else max(job.checkpoint, checkpoint)
    iteration = max(job.iteration, checkpoint[1])
    return msgspec.structs.replace(job, checkpoint=newest, iteration=iteration)
