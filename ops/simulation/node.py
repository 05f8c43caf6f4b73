"""A supervisor of the simulation: the production decisions of a node, and what executors do for them.

What it does at the store is what `daemon.executors` must do on etcd: nothing waits for an answer that
may never come, the newest member record is written until it is there, and a node that is cut off
goes on with what it knows.
"""

from __future__ import annotations  # else those of inner functions are evaluated at each call

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import joining
from rallypoint.daemon.core import node as decisions
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import LeaseExpiredError
from rallypoint.daemon.executors.keyspace import Keyspace
from rallypoint.daemon.executors.store import Lease, Listing
from rallypoint.daemon.shared.plan import Plan
from rallypoint.ops.simulation import keys
from rallypoint.ops.simulation.leading import Leading
from rallypoint.ops.simulation.scenario import DETECT_S

if TYPE_CHECKING:
    from rallypoint.ops.simulation.cluster import Cluster
    from rallypoint.ops.simulation.worker import Worker

KEEPALIVE_S: Final = 1.0
RETRY_S: Final = 0.4


class Node:
    """One machine with one supervisor, which may be down. ``index`` counts from 0."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.name = f"n{index:04d}"
        self.up = False
        """The supervisor runs."""
        self.machine = True
        """The machine runs and answers."""
        self.lost_s = 0.0
        """When the machine was lost last."""
        self.unlisted_s: float | None = cluster.clock.now
        """Since when its record is not in the store; None: it is there."""
        self.life = 0
        self.joined_s = 0.0
        self.asked_to_stop = False
        """The operator has asked this life of the supervisor to stop the job."""
        self.newest_used = 0
        """Newest generation number that this node has made durable as a leader."""
        self.incarnations = 0
        """Newest incarnation started in any slot."""
        self.state: NodeState
        self.leading = Leading(self)
        self.lease: Lease | None = None
        self.view_plan: Plan | None = None
        self.view_job: JobRecord | None = None
        self._saved: tuple[tuple[Plan, ...], JobRecord | None, int] = ((), None, 0)
        self._record: MemberRecord | None = None
        self._written: MemberRecord | None = None
        self._writing = False
        self._revision = 0
        self._pulling = False
        self._timer_s: float | None = None

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """A new life of the supervisor; it adopts or ends what the one before left."""
        scenario = self.cluster.scenario
        self.life += 1
        self.up, self.machine, self.asked_to_stop = True, True, False
        self.lease = self._record = self._written = self._timer_s = None
        self._writing = self._pulling = False
        self._revision = 0
        newest = max(self._saved[2], self.newest_used)
        policy = scenario.node_policy(self.index, self.life, self.incarnations, newest)
        self.state = decisions.initial(policy)
        self.cluster.leaders.discard(self)
        self.leading = Leading(self)
        adopted = self._take_over()
        self._join(adopted)

    def stop(self) -> None:
        """SIGKILL of the supervisor. What it had written to disk stays."""
        if self.up:
            state = self.state
            formed = () if state.formed_plan is None else (state.formed_plan,)
            later = tuple(p for p in state.plans if p.generation > state.formed)
            self._saved = ((*formed, *later), state.job, state.newest_generation)
            self.up = False
            self.cluster.unsupervised(self)

    def alive(self, act_: Callable[[], None]) -> Callable[[], None]:
        """``act_``, unless this life of the supervisor is over by then."""
        life = self.life

        def guarded() -> None:
            if self.up and self.life == life:
                act_()

        return guarded

    def _take_over(self) -> tuple[Worker, ...]:
        plans, job, _ = self._saved
        formed = next((p for p in plans if job is not None and p.generation == job.formed), None)
        left = [w for w in self.cluster.workers_of(self) if not w.reaped]
        trains = formed is not None and any(w.alive and formed.find(w.key) for w in left)
        for worker in left:
            if not trains:
                worker.reaped = True  # before its slot begins anew: no event
                self.cluster.end(worker, "not adopted")
        return tuple(left) if trains else ()

    # --- the store: joining, lease, record --------------------------------------------------------

    def _join(self, adopted: tuple[Worker, ...]) -> None:
        sent_s = self.cluster.clock.now

        def ask(keyspace: Keyspace, now: float) -> tuple[Lease, Listing, bool]:
            lease = keyspace.grant(DETECT_S, now)
            keyspace.compare_and_swap({keys.JOB: keys.encode(keys.FIRST_JOB)}, {keys.JOB: 0})
            enters = self._enter(keyspace)
            return lease, keyspace.list(keys.PREFIX), enters

        def answer(result: tuple[Lease, Listing, bool] | LeaseExpiredError | None) -> None:
            if isinstance(result, tuple) and result[2]:
                self._joined(adopted, result[0], result[1], sent_s)
            elif isinstance(result, tuple):
                self.stop()
            else:
                self.later(RETRY_S, lambda: self._join(adopted))

        self.request(ask, answer)

    def _enter(self, keyspace: Keyspace) -> bool:
        """What a supervisor that starts makes of a job that has ended. False: nobody is left of it, and to
        begin it again is not what the operator of this simulation wants."""
        item, members = keyspace.get(keys.JOB), keyspace.list(keys.MEMBERS).items
        others = tuple(keys.member_of(m) for m in members if m.key != keys.MEMBERS + self.name)
        if item is None or (job := keys.job_of(item)).state == "running":
            return True
        if others and not joining.ends_now(job, others):
            runs = msgspec.structs.replace(job, state="running", reason="")
            keyspace.compare_and_swap({keys.JOB: keys.encode(runs)}, {keys.JOB: item.mod_revision})
        return bool(others)

    def _joined(
        self, adopted: tuple[Worker, ...], lease: Lease, listing: Listing, sent_s: float
    ) -> None:
        self._hold(lease, sent_s)
        self.joined_s = self.cluster.clock.now
        if adopted:
            newest = next((i for i in listing.items if i.key == keys.GENERATION), None)
            known = 0 if newest is None else keys.plan_of(newest).generation
            for plan in self._saved[0]:
                if plan.generation < known:
                    self.decide(ev.PlanSeen(plan))
        self._revision = listing.revision
        self._read(listing)
        self.decide(ev.NodeStarted(tuple(ev.AdoptedWorker(w.key, 1) for w in adopted)))
        for worker in adopted:
            self.cluster.adopt(self, worker)
        self.later(KEEPALIVE_S, self._keep)
        self.pull()

    def _keep(self) -> None:
        lease, sent_s = self.lease, self.cluster.clock.now

        def answer(result: Lease | LeaseExpiredError | None) -> None:
            if isinstance(result, LeaseExpiredError):
                self._renew(lease)
            elif result is not None and self.lease is lease:
                self._hold(result, sent_s)

        if lease is not None:
            self.request(lambda keyspace, now: keyspace.keepalive(lease, now), answer)
        self.later(KEEPALIVE_S, self._keep)

    def _renew(self, lost: Lease | None) -> None:
        """The lease is over: take a new one, and write the member record under it."""
        if self.lease is not lost:
            return
        self.lease, sent_s = None, self.cluster.clock.now
        self.leading.lose("the lease is over")

        def answer(result: Lease | LeaseExpiredError | None) -> None:
            if isinstance(result, Lease):
                self._hold(result, sent_s)
                self._written = None
                self._write()
                self.leading.campaign()
            elif self.lease is None:
                self.later(RETRY_S, lambda: self._renew(None))

        self.request(lambda keyspace, now: keyspace.grant(DETECT_S, now), answer)

    def _hold(self, lease: Lease, sent_s: float) -> None:
        deadline_s = sent_s + lease.ttl_s
        self.lease = replace(lease, deadline_s=deadline_s)
        if self.state.past_lease(self.cluster.clock.now):
            self.leading.decide(ev.StoreReturned())
        self.decide(ev.LeaseKept(deadline_s))

    def _write(self) -> None:
        """Write the newest member record, again and again until it is there."""
        record, lease = self._record, self.lease
        if record is None or lease is None or self._writing or record is self._written:
            return
        self._writing = True

        def answer(result: int | LeaseExpiredError | None) -> None:
            self._writing = False
            if isinstance(result, LeaseExpiredError):
                self._renew(lease)
                self._write()  # where a new lease came while this was under way
            elif result is None:
                self.later(RETRY_S, self._write)
            else:
                self._written = (
                    record if self.lease is not None and self.lease.id == lease.id else None
                )
                self._write()

        value = keys.encode(record)
        self.request(
            lambda keyspace, now: keyspace.put(keys.MEMBERS + self.name, value, lease), answer
        )

    # --- the store: watching ----------------------------------------------------------------------

    def pull(self) -> None:
        """Something may have changed: read it after a while."""
        if self.up and not self._pulling and self._revision:
            self._pulling = True
            self.later(self.cluster.delay_s(), self._pull)

    def _pull(self) -> None:
        self._pulling = False
        etcd = self.cluster.etcd
        if not etcd.reaches(self.index):
            return  # the cluster pulls for everybody when a link comes back
        revision = etcd.keys.revision
        public, members = self._revision, self.leading.members_revision
        self._revision = self.leading.members_revision = revision
        if min(public, members if self.leading.leads else public) + 1 < etcd.keys.oldest:
            self._read(etcd.keys.list(keys.PREFIX))  # compacted
            return
        changed = etcd.public.since(public)
        if self.leading.leads:
            changed = sorted(
                changed + etcd.members.since(members), key=lambda event: event.mod_revision
            )
        self.leading.take(changed)

    def _read(self, listing: Listing) -> None:
        found = {item.key: item for item in listing.items}
        if keys.GENERATION in found:
            self.see_plan(keys.plan_of(found[keys.GENERATION]))
        if keys.JOB in found:
            self.see_job(keys.job_of(found[keys.JOB]))
        self.leading.read(found)

    def see_plan(self, plan: Plan) -> None:
        """The ``generation`` key as this node reads it."""
        self.view_plan = plan
        self.decide(ev.PlanSeen(plan))

    def see_job(self, job: JobRecord) -> None:
        """The ``job`` key as this node reads it."""
        self.view_job = job
        self.decide(ev.JobSeen(job))

    # --- decisions --------------------------------------------------------------------------------

    def decide(self, event: ev.NodeEvent) -> None:
        """Decide about one event, and carry the orders out."""
        if not self.up:
            return
        self.state, orders = decisions.decide(self.state, event, self.cluster.clock.now)
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: act.NodeAction) -> None:
        cluster = self.cluster
        match order:
            case act.SetTimer(at_s=at_s):
                self._timer_s = at_s
                self.later(max(0.0, at_s - cluster.clock.now), lambda: self._fire(at_s))
            case act.StartWorker(key=key):
                self.incarnations = max(self.incarnations, key.incarnation)
                cluster.spawn(self, key)
            case act.KillWorker(key=key, reason=reason):
                cluster.end(cluster.workers[key], reason)
            case act.WriteMember(record=record):
                self._record = record
                self._write()
            case act.SendPlan(key=key, plan=plan):
                cluster.checks.acts_under_lease(self, f"{key} is told of {plan.generation}")
                cluster.tell(self, key, lambda worker: worker.hear(plan))
            case act.SendFormedMark(key=key, generation=generation):
                cluster.tell(self, key, lambda worker: worker.hear_mark(generation))
            case act.SendStop(key=key):
                cluster.tell(self, key, lambda worker: worker.hear_stop())
            case act.SendCheckpoint(key=key):
                cluster.tell(self, key, lambda worker: worker.hear_commit())
            case act.SendLeave(key=key, reason=reason):
                cluster.tell(self, key, lambda worker: worker.leave(reason))
            case act.ExitSupervisor(code=code, reason=reason):
                cluster.log(f"{self.name} exits with {code}: {reason}")
                cluster.exited(self, code, reason)
            case _:
                if isinstance(order, act.Explain) and cluster.trace is not None:
                    cluster.log(f"{self.name} {order.event}: {order.reason}")

    def _fire(self, at_s: float) -> None:
        if self._timer_s == at_s:
            self._timer_s = None
            self.decide(ev.TimerFired())

    # --- small ------------------------------------------------------------------------------------

    def ready_long(self, seconds: float) -> bool:
        """Whether it could have been let in for this long: up, linked, under its lease, not leaving."""
        cluster = self.cluster
        return (
            self.up
            and self.machine
            and self.lease is not None
            and cluster.etcd.keys.holds(self.lease)
            and cluster.etcd.reaches(self.index)
            and cluster.clock.now - max(cluster.linked_since_s, self.joined_s) > seconds
            and self.index not in cluster.parts
            and not self.state.drain_cause
            and self.state.quarantined_until_s is None
        )

    def iteration(self) -> int:
        """What it knows of the job's progress: nothing while no worker of its own takes part. So a leader does
        not record what a generation of others committed that it was cut off from."""
        formed = self.state.formed_plan
        mine = () if formed is None else self.cluster.workers_of(self)
        return max((w.state.iteration for w in mine if formed and formed.find(w.key)), default=0)

    def cut_off_within(self, seconds: float) -> bool:
        """Whether it is cut off from the store, or somebody was in the last so many seconds."""
        cluster = self.cluster
        since_s = cluster.clock.now - cluster.linked_since_s
        return since_s < seconds or not cluster.etcd.reaches(self.index)

    def later(self, delay_s: float, act_: Callable[[], None]) -> None:
        """Let this life of the supervisor do something in ``delay_s`` seconds."""
        self.cluster.clock.after(delay_s, self.alive(act_))

    def request(
        self,
        ask: Callable[[Keyspace, float], keys.T],
        answer: Callable[[keys.T | LeaseExpiredError | None], None],
    ) -> None:
        """Ask the store something in this life of the supervisor."""
        life = self.life

        def close(result: keys.T | LeaseExpiredError | None) -> None:
            if self.up and self.life == life:
                answer(result)

        self.cluster.etcd.request(self.index, ask, close)
