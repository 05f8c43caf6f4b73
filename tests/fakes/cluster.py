"""Nodes, a leader and a store in virtual time, with a model of workers: who forms, trains, breaks.

Every message waits in its own first-in-first-out line (worker to node, store to node, store to
leader), and a seeded choice says which line moves next, so that any order comes up that the real
program could see. Nothing here knows how the decisions are made.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import leader, node
from rallypoint.daemon.core.leaderstate import LeaderState
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.policy import LeaderPolicy, NodePolicy
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from tests.fakes.worker_model import FakeWorker, WorkerModel

STEP_S = 0.02


@dataclass
class FakeNode:
    """One supervisor."""

    state: NodeState
    line: deque[ev.NodeEvent] = field(default_factory=deque)
    timer_s: float | None = None
    exit_code: int | None = None


class Cluster(WorkerModel):
    """``check`` is called with each plan right before it is written."""

    def __init__(
        self,
        policy: LeaderPolicy,
        slots: dict[str, int],
        seed: int,
        check: Callable[["Cluster", Plan], None] = lambda cluster, plan: None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.slots = slots
        self.random = random.Random(seed)  # noqa: S311 - chooses orders and faults
        self.check = check
        self.now = 100.0
        self.nodes: dict[str, FakeNode] = {}
        self.members: dict[str, MemberRecord] = {}
        self.plan: Plan | None = None
        self.leader: LeaderState | None = None
        self.leader_line: deque[ev.LeaderEvent] = deque()
        self.leader_timer_s: float | None = None
        self.incarnation = 0
        self.refuses = 0
        """How many of the next writes of the leader the store refuses."""
        for name in slots:
            self.start_node(name)
        self.elect()

    # --- faults and operators ---------------------------------------------------------------------

    def start_node(self, name: str) -> None:
        """A new supervisor; whatever its predecessor left is ended first."""
        for worker in self.workers.values():
            if worker.key.node == name:
                worker.alive = False
        self.incarnation += 1
        policy = NodePolicy(
            node=name,
            incarnation=self.incarnation,
            advertise=name,
            slots=self.slots[name],
            first_incarnation=100 * self.incarnation,
            stop_grace_s=30.0,
            adopt_s=5.0,
            quarantine_after=6,
            quarantine_cooldown_s=20.0,
            versions={},
            job_uid="job",
            config_hash="hash",
            newest_generation=0,
        )
        fresh = FakeNode(node.initial(policy))
        self.nodes[name] = fresh
        fresh.line.append(ev.NodeStarted())
        if self.plan is not None:
            fresh.line.append(ev.PlanSeen(self.plan))
        fresh.line.append(ev.JobSeen(self.job))

    def lose_node(self, name: str, *, workers_too: bool = True) -> None:
        """The supervisor is gone and its lease has run out; its workers may linger."""
        del self.nodes[name]
        self.members.pop(name, None)
        for worker in self.workers.values():
            if worker.key.node == name and workers_too:
                worker.alive = False  # else they linger until the node's next supervisor
        self._tell_leader(ev.MembersChanged(self._members()))

    def elect(self) -> None:
        """A new leader that knows only the store."""
        self.leader = leader.initial(self.policy)
        self.leader_line.clear()
        self.leader_timer_s = None
        newest = self.plan.generation if self.plan is not None else 0
        self._tell_leader(ev.LeaderElected(self._members(), self.plan, self.job, newest))

    def refuse(self, writes: int) -> None:
        """The store refuses the next writes of the leader."""
        self.refuses = writes

    def order(self, name: str, event: ev.NodeEvent) -> None:
        """An operator's or the store's word to one node."""
        self.nodes[name].line.append(event)

    # --- running ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """A little time passes, what is due fires, and one thing happens. False when nothing can."""
        self.now += STEP_S
        self._fire_due()
        choices: list[Callable[[], None]] = []
        for fake in self.nodes.values():
            if fake.line:
                choices.append(lambda fake=fake: self._node(fake, fake.line.popleft()))  # type: ignore[misc]
        for worker in self.workers.values():
            fake_node = self.nodes.get(worker.key.node)
            if worker.line and fake_node is not None:
                choices.append(
                    lambda w=worker, n=fake_node: self._node(n, w.line.popleft())  # type: ignore[misc]
                )
        if self.leader_line:
            choices.append(lambda: self._lead(self.leader_line.popleft()))
        choices += self.moves()
        if not choices:
            return False
        self.random.choice(choices)()
        return True

    def pass_time(self) -> bool:
        """Go to the next timer and fire it. False when there is none."""
        timers = [fake.timer_s for fake in self.nodes.values()] + [self.leader_timer_s]
        due = [timer for timer in timers if timer is not None]
        if not due:
            return False
        self.now = max(self.now, min(due))
        self._fire_due()
        return True

    def _fire_due(self) -> None:
        for fake in list(self.nodes.values()):
            if fake.timer_s is not None and fake.timer_s <= self.now:
                fake.timer_s = None
                self._node(fake, ev.TimerFired())
        if self.leader_timer_s is not None and self.leader_timer_s <= self.now:
            self.leader_timer_s = None
            self._lead(ev.TimerFired())

    def settle(self, most: int = 4000, until: Callable[[], bool] = lambda: False) -> None:
        """Run until ``until`` holds, or nothing can happen any more."""
        for _ in range(most):
            if until() or not (self.step() or self.pass_time()):
                return

    def trains(self) -> bool:
        """Whether the newest plan has formed, is marked, and lists every living worker."""
        plan = self.plan
        living = self.live()
        return (
            plan is not None
            and self.job.formed == plan.generation
            and bool(living)
            and all(w.phase == "training" and w.generation == plan.generation for w in living)
            and plan.world_size == len(living)
        )

    def wish(self, **changes: Any) -> None:
        """An operator changes the job's record, as `rallypoint pause` and others do."""
        self._write_job(msgspec.structs.replace(self.job, **changes))

    # --- decisions --------------------------------------------------------------------------------

    def _members(self) -> tuple[MemberRecord, ...]:
        return tuple(self.members[name] for name in sorted(self.members))

    def _tell_leader(self, event: ev.LeaderEvent) -> None:
        if self.leader is not None:
            self.leader_line.append(event)

    def _node(self, fake: FakeNode, event: ev.NodeEvent) -> None:
        fake.state, orders = node.decide(fake.state, event, self.now)
        for order in orders:
            self._carry_out(fake, order)

    def _carry_out(self, fake: FakeNode, order: act.NodeAction) -> None:
        match order:
            case act.SetTimer(at_s=at_s):
                fake.timer_s = at_s
            case act.StartWorker(key=key):
                worker = FakeWorker(key)
                worker.line.append(ev.WorkerSpawned(key, 1000 + len(self.workers)))
                self.workers[key] = worker
            case act.KillWorker(key=key):
                if self.workers[key].alive:
                    self.kill(self.workers[key])
            case act.WriteMember(record=record):
                # As in the store: what does not survive its JSON would not arrive.
                record = msgspec.json.decode(msgspec.json.encode(record), type=MemberRecord)
                self.members[record.node] = record
                self._tell_leader(ev.MembersChanged(self._members()))
            case act.SendPlan(key=key, plan=plan):
                self.take_plan(self.workers[key], plan)
            case act.SendFormedMark(key=key, generation=generation):
                worker = self.workers[key]
                worker.formed_seen = max(worker.formed_seen, generation)
            case act.SendStop(key=key):
                self.workers[key].stop = True
            case act.SendLeave(key=key, reason=reason):
                self.workers[key].leave = reason
            case act.ExitSupervisor(code=code):
                fake.exit_code = code

    def _lead(self, event: ev.LeaderEvent) -> None:
        assert self.leader is not None
        self.leader, orders = leader.decide(self.leader, event, self.now)
        for order in orders:
            match order:
                case act.SetTimer(at_s=at_s):
                    self.leader_timer_s = at_s
                case act.ProbeMembers(probe=number, targets=targets):
                    self._probe(number, targets)
                case act.PublishPlan(plan=plan, replaces=replaces):
                    self._write_plan(plan, replaces)
                case act.MarkFormed(generation=generation):
                    self._mark(generation)
                case act.RecordCheckpoint(checkpoint=checkpoint):
                    self._write_job(msgspec.structs.replace(self.job, checkpoint=checkpoint))
                case act.SetJobState(state=state, reason=reason):
                    self._write_job(msgspec.structs.replace(self.job, state=state, reason=reason))

    def _probe(self, number: int, targets: tuple[WorkerKey, ...]) -> None:
        alive = {w.key: w.frozen for w in self.live()}
        there = tuple(key for key in targets if alive.get(key) is False)
        gone = tuple(key for key in targets if key not in alive)
        silent = tuple(key for key in targets if alive.get(key) is True)
        self._tell_leader(ev.ProbeAnswered(number, there, gone, silent))

    def _refused(self, generation: int) -> bool:
        if self.refuses:
            self.refuses -= 1
            self._tell_leader(ev.PublishRefused(generation, "the store does not answer"))
            return True
        return False

    def _mark(self, generation: int) -> None:
        if self._refused(generation):
            return
        if self.plan is not None and self.plan.generation == generation:
            newest = max(self.committed, default=0)
            self._write_job(msgspec.structs.replace(self.job, formed=generation, iteration=newest))

    def _write_plan(self, plan: Plan, replaces: int) -> None:
        if self._refused(plan.generation):
            return
        newest = 0 if self.plan is None else self.plan.generation
        if newest != replaces:
            self._tell_leader(ev.PublishRefused(plan.generation, f"generation {newest} is newest"))
            return
        self.check(self, plan)
        self.plan = self.plans[plan.generation] = plan
        if plan.restore:
            self._write_job(msgspec.structs.replace(self.job, restore_generation=plan.generation))
        for fake in self.nodes.values():
            fake.line.append(ev.PlanSeen(plan))
        self._tell_leader(ev.PlanChanged(plan))

    def _write_job(self, job: JobRecord) -> None:
        self.job = job
        for fake in self.nodes.values():
            fake.line.append(ev.JobSeen(job))
        self._tell_leader(ev.JobChanged(job))
