"""Short ways to say who is where: slots, members, plans and policies for tests of the decisions."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from rallypoint.daemon.core import actions as act
from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import leader, node
from rallypoint.daemon.core.policy import LeaderPolicy, NodePolicy
from rallypoint.daemon.core.records import JobRecord, MemberRecord, SlotRecord
from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey

A = TypeVar("A")

LEADER_DEFAULTS: dict[str, Any] = {
    "budget": "per_rank",
    "num_envs": 16,
    "block": 8,
    "min_workers": 1,
    "max_workers": 4,
    "coalesce_s": 0.05,
    "probe_s": 0.2,
    "join_debounce_s": 1.0,
    "spares": 0,
    "detect_s": 5.0,
    "witness_s": 1.0,
    "holder_wait_s": 15.0,
    "alone": True,
    "shared_checkpoints": True,
}


def leader_policy(**changes: Any) -> LeaderPolicy:
    """The policy of a job of at most four workers, 16 envs each."""
    return LeaderPolicy(**{**LEADER_DEFAULTS, **changes})


def node_policy(slots: int = 2) -> NodePolicy:
    """Node ``a``; its workers' incarnations begin at 1."""
    return NodePolicy(
        node="a",
        incarnation=1,
        advertise="127.0.0.1",
        slots=slots,
        first_incarnation=0,
        stop_grace_s=30.0,
        adopt_s=5.0,
        quarantine_after=12,
        quarantine_cooldown_s=300.0,
        versions={},
        job_uid="uid",
        config_hash="hash",
        newest_generation=0,
    )


def key(slot: int, incarnation: int = 1, node_name: str = "a") -> WorkerKey:
    """Key of a worker of node ``a``."""
    return WorkerKey(node_name, slot, incarnation)


def slot_record(slot: int, state: str = "ready", **fields: Any) -> SlotRecord:
    """A slot whose first worker is warm."""
    values: dict[str, Any] = {
        "incarnation": 1,
        "host": "host",
        "port": 5000 + slot,
        "ready_order": slot + 1,
        **fields,
    }
    return SlotRecord(slot=slot, state=state, **values)  # type: ignore[arg-type]


def trained(slot: int, formed: int, **fields: Any) -> SlotRecord:
    """A slot whose worker trains in generation ``formed``, with the blocks it got there."""
    fields = {"blocks": (2 * slot, 2 * slot + 1), "checkpoint": (formed, 0), **fields}
    return slot_record(slot, fields.pop("state", "training"), last_formed=formed, **fields)


def member(*slots: SlotRecord, node_name: str = "a", **fields: Any) -> MemberRecord:
    """The record of a node."""
    return MemberRecord(node=node_name, incarnation=1, advertise="host", slots=slots, **fields)


def job(**fields: Any) -> JobRecord:
    """A job that runs."""
    return JobRecord(uid="uid", config_hash="hash", versions={}, **fields)


def plan(
    generation: int,
    *keys: WorkerKey,
    kind: str = "forced",
    survivors: tuple[WorkerKey, ...] = (),
    **fields: Any,
) -> Plan:
    """A plan of these workers in rank order."""
    members = tuple(
        PlannedWorker(k, rank, "host", 5000 + k.slot, (2 * k.slot, 2 * k.slot + 1))
        for rank, k in enumerate(keys)
    )
    values: dict[str, Any] = {
        "cause": "start",
        "formed": 0,
        "restore": False,
        "hold": False,
        "commit_first": False,
        "budget_envs": 16,
        **fields,
    }
    return Plan(
        generation=generation,
        kind=kind,  # type: ignore[arg-type]
        members=members,
        survivors=survivors,
        **values,
    )


@dataclass
class LeaderScript:
    """Feeds events to a leader, records checkpoints, and answers its probes with "all of them live", but for ``gone`` and
    ``silent``. Remembers what it ordered last."""

    policy: LeaderPolicy
    now: float = 100.0
    gone: set[WorkerKey] = field(default_factory=set)
    silent: set[WorkerKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = leader.initial(self.policy)
        self.orders: tuple[act.LeaderAction, ...] = ()

    def elect(
        self,
        *members: MemberRecord,
        plan: Plan | None = None,
        job_record: JobRecord | None = None,
        newest: int = 0,
    ) -> "LeaderScript":
        """Begin from this view."""
        return self.feed(ev.LeaderElected(members, plan, job_record or job(), newest))

    def see(self, *members: MemberRecord) -> "LeaderScript":
        return self.feed(ev.MembersChanged(members))

    def feed(self, event: ev.LeaderEvent) -> "LeaderScript":
        """One event, and the answer to the probe that it leads to."""
        self.state, self.orders = leader.decide(self.state, event, self.now)
        self._record()
        probes = self.all_of(act.ProbeMembers)
        if probes:
            first, probe = self.orders, probes[0]
            absent = self.gone | self.silent
            answer = ev.ProbeAnswered(
                probe.probe,
                tuple(k for k in probe.targets if k not in absent),
                tuple(k for k in probe.targets if k in self.gone),
                tuple(k for k in probe.targets if k in self.silent),
            )
            self.feed(answer)
            self.orders = (*first, *self.orders)
        return self

    def _record(self) -> None:
        for order in self.all_of(act.RecordCheckpoint):
            assert self.state.job is not None
            record = msgspec.structs.replace(self.state.job, checkpoint=order.checkpoint)
            self.state = replace(self.state, job=record)
        self.orders = tuple(o for o in self.orders if not isinstance(o, act.RecordCheckpoint))

    def wait(self) -> "LeaderScript":
        """Let the time pass to the timer that was asked for."""
        assert self.state.timer_at_s is not None, "it waits for no time"
        self.now = self.state.timer_at_s
        return self.feed(ev.TimerFired())

    def all_of(self, kind: type[A]) -> list[A]:
        return [order for order in self.orders if isinstance(order, kind)]

    @property
    def published(self) -> Plan:
        """The one plan that the last event led to."""
        (order,) = self.all_of(act.PublishPlan)
        return order.plan

    @property
    def ranks(self) -> list[WorkerKey]:
        """Members of the plan published last, in rank order."""
        return [m.key for m in self.published.members]

    @property
    def said(self) -> str:
        """All reasons given by the last event."""
        return "\n".join(order.reason for order in self.all_of(act.Explain))


def node_record(name: str, formed: int = 3, **fields: Any) -> MemberRecord:
    """A node with one worker that has formed this generation; ``fields`` are of its slot."""
    return member(trained(0, formed, **fields), node_name=name)


def training_leader(
    *keys: WorkerKey, policy: dict[str, Any] | None = None, **fields: Any
) -> LeaderScript:
    """A leader that was elected long ago; these workers train in generation 3."""
    settings = {"alone": False, **(policy or {})}
    script = LeaderScript(leader_policy(**settings))
    present = plan(3, *keys, survivors=keys, **fields)
    script.elect(*(node_record(k.node) for k in keys), plan=present, job_record=job(formed=3))
    script.now += 100.0
    return script


class NodeScript:
    """Feeds events to a node and remembers what it ordered."""

    def __init__(self, slots: int = 2, now: float = 100.0) -> None:
        self.state = node.initial(node_policy(slots))
        self.now = now
        self.orders: tuple[act.NodeAction, ...] = ()

    def feed(self, *events: ev.NodeEvent) -> "NodeScript":
        """All of ``events``; `orders` are those of all of them."""
        orders: list[act.NodeAction] = []
        for event in events:
            self.state, more = node.decide(self.state, event, self.now)
            orders += more
        self.orders = tuple(orders)
        return self

    def wait(self) -> "NodeScript":
        """Let the time pass to the timer that was asked for."""
        assert self.state.timer_at_s is not None, "it waits for no time"
        self.now = self.state.timer_at_s
        return self.feed(ev.TimerFired())

    def make_ready(self, *slots: int) -> "NodeScript":
        """Bring the present worker of each slot to ready."""
        for slot in slots:
            k = self.key(slot)
            self.feed(
                ev.WorkerSpawned(k, 1000 + slot),
                ev.WorkerConnected(k),
                ev.WorkerBecameReady(k, "host", 5000 + slot, "cpu", 0, 0, None),
            )
        return self

    def make_train(self, generation: int = 1, **fields: Any) -> "NodeScript":
        """All slots ready, planned together, formed and marked."""
        self.feed(ev.NodeStarted()).make_ready(*range(len(self.state.slots)))
        keys = [self.key(s.slot) for s in self.state.slots]
        self.feed(ev.PlanSeen(plan(generation, *keys, **fields)))
        self.feed(*(ev.WorkerFormed(k, generation, "hash", 0) for k in keys))
        return self.feed(ev.JobSeen(job(formed=generation)))

    def key(self, slot: int) -> WorkerKey:
        return self.state.key(self.state.slots[slot])

    def exit(self, slot: int, signal: int | None = 9) -> "NodeScript":
        """The present worker of a slot is gone."""
        code = None if signal else 0
        return self.feed(ev.WorkerExited(self.key(slot), code, signal, ""))

    def all_of(self, kind: type[A]) -> list[A]:
        return [order for order in self.orders if isinstance(order, kind)]

    @property
    def states(self) -> list[str]:
        return [slot.state for slot in self.state.slots]
