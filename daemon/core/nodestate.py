"""The state of one node's decisions: what `core.node` keeps and `status` shows."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rallypoint.daemon.core.errors import Recent
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.policy import NodePolicy
from rallypoint.daemon.core.records import (
    FaultRecord,
    JobRecord,
    MemberRecord,
    SlotRecord,
    WaitRecord,
    WorkerState,
)
from rallypoint.daemon.shared.plan import Plan, WorkerKey

PLANS_KEPT = 4
"""A report about a generation may come after newer plans; this many are remembered."""


@dataclass(frozen=True)
class SlotState:
    """One slot and the life of the worker in it."""

    slot: int
    incarnation: int
    state: WorkerState = "stopped"
    pid: int | None = None
    connected: bool = False
    rank: int | None = None
    """Rank in the newest plan; None: it is in no plan."""
    blocks: tuple[int, ...] = ()
    """Env blocks of the last generation it formed."""
    committed_iteration: int | None = None
    restarts: int = 0
    """Restarts of this slot since the supervisor started."""
    failures: int = 0
    """Lives that ended before they formed, or crashed, since an iteration was last committed here."""
    quarantined_for: str = ""
    """How the life ended that put this slot into quarantine; kept until it starts again."""
    restart_at_s: float | None = None
    """When the next life begins; None: nothing is due."""
    adopt_by_s: float | None = None
    """When an adopted worker must have said Hello; None: it has, or it was started here."""
    host: str = ""
    port: int = 0
    device: str = ""
    capacity_envs: int = 0
    ready_order: int = 0
    last_formed: int = 0
    broken_generation: int = 0
    checkpoint: tuple[int, int] | None = None
    left: str = ""
    """Why this life left by agreement; "" while it has not."""
    told: Literal["", "stop", "leave"] = ""
    """What it was told about the end."""
    fault: FaultRecord | None = None
    hung_incarnation: int = 0
    stuck_generation: int = 0
    misbehaved: bool = False
    """This life broke the protocol and is being ended; nothing that it says counts any more."""

    @property
    def live(self) -> bool:
        """There is a process, or the order to start one was given."""
        return self.state not in ("stopped", "lost", "quarantined")

    @property
    def trains(self) -> bool:
        """It is past warm-up: it can be in a plan."""
        return self.state in ("ready", "training", "rebuilding", "waiting", "draining")

    def record(self) -> SlotRecord:
        """What the member record says of this slot."""
        return SlotRecord(
            slot=self.slot,
            incarnation=self.incarnation,
            state=self.state,
            host=self.host,
            port=self.port,
            device=self.device,
            capacity_envs=self.capacity_envs,
            ready_order=self.ready_order,
            last_formed=self.last_formed,
            broken_generation=self.broken_generation,
            checkpoint=self.checkpoint,
            blocks=self.blocks,
            left=self.left,
            fault=self.fault,
            hung_incarnation=self.hung_incarnation,
            stuck_generation=self.stuck_generation,
        )


@dataclass(frozen=True)
class Ending:
    """Why and how this supervisor comes to its end. No worker is started any more."""

    kind: Literal["stop", "finish", "drain", "fail"]
    code: int
    reason: str
    deadline_s: float | None
    """Monotonic time at which what is left is killed; None: not bounded yet."""
    exited: bool = False
    """The order to exit was given."""
    awaits_job: bool = False
    """It ends by agreement with other nodes: its record, which says so, stays until the leader has
    written the end of the job, or ``deadline_s`` is there."""
    asked: bool = False
    """A drain or a notice came while it was ending already, and said by when it must be gone."""


@dataclass(frozen=True)
class NodeState:
    """Everything the decisions of one node remember."""

    policy: NodePolicy
    slots: tuple[SlotState, ...]
    started: bool = False
    ready_count: int = 0
    plans: tuple[Plan, ...] = ()
    """The newest plans seen, newest last."""
    job: JobRecord | None = None
    member: MemberRecord | None = None
    """The member record as ordered last."""
    ending: Ending | None = None
    drain_seconds: float | None = None
    """How long the node had when it was told last that it has to go."""
    drain_cause: Literal["", "drain", "notice"] = ""
    """Not empty: the node drains."""
    lease_until_s: float = math.inf
    """Until when this node's lease is known to hold; no bound before the first `LeaseKept`."""
    leased_since_s: float = -math.inf
    """When this node got its lease again after it had run out; -inf: it never has."""
    formed_plan: Plan | None = None
    """The plan of the newest generation marked formed, when this node has seen it."""
    checkpoint: tuple[int, int] | None = None
    """(generation, iteration) of the newest verified checkpoint any worker of this node spoke of."""
    omissions: int = 0
    """Forced plans, each soon after the one before, that left out a worker of this node that lives."""
    omitted_at_s: float = -math.inf
    """When the newest of them was seen."""
    quarantined_until_s: float | None = None
    """When this node's workers may be let in again; None: they may be."""
    waits: tuple[WaitRecord, ...] = ()
    """Workers of this node that have waited for others for longer than is usual."""
    timer_at_s: float | None = None
    recent: Recent = ()
    """The last events, for the error about an invalid one."""

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        return self.plans[-1] if self.plans else None

    @property
    def formed(self) -> int:
        """The newest generation marked formed, as far as this node knows."""
        return 0 if self.job is None else self.job.formed

    def past_lease(self, now: float) -> bool:
        """Whether this node must take itself for cut off: it commits nothing and enters nothing."""
        return now >= self.lease_until_s

    def key(self, slot: SlotState) -> WorkerKey:
        """The key of the worker that lives (or lived last) in this slot."""
        return WorkerKey(self.policy.node, slot.slot, slot.incarnation)

    def with_slot(self, index: int, **changes: Any) -> "NodeState":
        """This state with some fields of one slot replaced."""
        slots = list(self.slots)
        slots[index] = replace(slots[index], **changes)
        return replace(self, slots=tuple(slots))

    def engaged(self, slot: SlotState) -> bool:
        """Whether others count on this worker: it is in the newest plan, or trains on in the
        generation before a planned plan without it, until that one has formed."""
        plan = self.plan
        if plan is None:
            return False
        if plan.find(self.key(slot)) is not None:
            return True
        pending = plan.kind == "planned" and self.formed < plan.generation
        return pending and slot.last_formed >= max(1, self.formed)

    @property
    def newest_generation(self) -> int:
        """Newest generation number that this node has ever seen."""
        seen = self.plan.generation if self.plan is not None else 0
        return max(self.policy.newest_generation, seen)

    def shown(self, slot: SlotState) -> WorkerState:
        """The state of a slot as operators see it: who is warm, but kept out, is in quarantine."""
        return "quarantined" if self.quarantine and slot.state == "ready" else slot.state

    @property
    def quarantine(self) -> str:
        """Why none of this node's workers is let in for now; "" while they may be."""
        if self.quarantined_until_s is None:
            return ""
        return f"{self.omissions} plans in a row left out its workers although they live"

    def record(self) -> MemberRecord:
        """The member record of this state."""
        return MemberRecord(
            node=self.policy.node,
            incarnation=self.policy.incarnation,
            advertise=self.policy.advertise,
            slots=tuple(slot.record() for slot in self.slots),
            draining=bool(self.drain_cause),
            deadline_s=self.drain_seconds,
            drain_cause=self.drain_cause,
            versions=dict(self.policy.versions),
            job_uid=self.policy.job_uid,
            config_hash=self.policy.config_hash,
            checkpoint=self.checkpoint,
            newest_generation=self.newest_generation,
            port=self.policy.port,
            quarantined=self.quarantine,
            waits=self.waits,
        )
