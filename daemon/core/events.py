"""Past facts that the decisions react to. Executors make them; nobody else does."""

from dataclasses import dataclass

from rallypoint.daemon.core.records import JobRecord, MemberRecord, WaitRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey

# --- events of one node (core.node) --------------------------------------------------------


@dataclass(frozen=True)
class AdoptedWorker:
    """A worker that an earlier supervisor started, taken over by this one."""

    key: WorkerKey
    pid: int


@dataclass(frozen=True)
class NodeStarted:
    """The supervisor holds the directory, took over or ended every earlier worker, and joined the
    store."""

    adopted: tuple[AdoptedWorker, ...] = ()


@dataclass(frozen=True)
class WorkerSpawned:
    """The process of a slot's next life has started."""

    key: WorkerKey
    pid: int


@dataclass(frozen=True)
class SpawnFailed:
    """No process could be started; counts as a life that ended at once."""

    key: WorkerKey
    error: str


@dataclass(frozen=True)
class WorkerConnected:
    """Hello arrived and was accepted."""

    key: WorkerKey


@dataclass(frozen=True)
class WorkerBecameReady:
    """Warm: env built, first step done, store server bound at ``host:port``."""

    key: WorkerKey
    host: str
    port: int
    device: str
    capacity_envs: int
    last_formed: int
    checkpoint: tuple[int, int] | None


@dataclass(frozen=True)
class WorkerBroke:
    """A collective of this generation failed in a worker that lives, or it cannot hold its envs."""

    key: WorkerKey
    generation: int
    error: str
    capacity_envs: int = 0
    """Most envs that it can hold, where it has learned that by this; else 0."""


@dataclass(frozen=True)
class WorkerFormed:
    """The worker has formed this generation; ``iteration`` is its newest committed one."""

    key: WorkerKey
    generation: int
    state_hash: str
    iteration: int


@dataclass(frozen=True)
class WorkerCommitted:
    """The worker has committed an iteration; ``env_steps`` is the job's total."""

    key: WorkerKey
    generation: int
    iteration: int
    env_steps: int


@dataclass(frozen=True)
class WorkerCheckpointed:
    """A checkpoint of this (generation, iteration) is committed and verified."""

    key: WorkerKey
    generation: int
    iteration: int


@dataclass(frozen=True)
class WorkerFaulted:
    """The program of the worker raised; it is about to exit."""

    key: WorkerKey
    generation: int
    iteration: int
    fingerprint: str
    traceback: str


@dataclass(frozen=True)
class WorkerLeft:
    """The worker said that it exits by agreement (finished, stopped, drained, orphaned)."""

    key: WorkerKey
    iteration: int
    reason: str


@dataclass(frozen=True)
class WorkerExited:
    """The process is gone, and its process group swept."""

    key: WorkerKey
    code: int | None
    signal: int | None
    reason: str


@dataclass(frozen=True)
class WorkerHung:
    """The worker is silent while others wait for it; the readings of its page prove it."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class WorkerMisbehaved:
    """The worker said what no worker of this protocol says: its program is not to be trusted."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class GenerationStuck:
    """All members wait for each other in this generation, and nothing moves."""

    generation: int
    reason: str


@dataclass(frozen=True)
class WaitsChanged:
    """Which workers of this node have waited for others for longer than is usual."""

    waits: tuple[WaitRecord, ...]


@dataclass(frozen=True)
class QuarantineCleared:
    """The operator lets quarantined slots start again: this one, or all (None)."""

    slot: int | None


@dataclass(frozen=True)
class PlanSeen:
    """The ``generation`` key, as this node reads it."""

    plan: Plan


@dataclass(frozen=True)
class JobSeen:
    """The ``job`` key, as this node reads it."""

    job: JobRecord


@dataclass(frozen=True)
class StopRequested:
    """The operator (or SIGTERM under embedded membership) stops the job: agree, checkpoint, exit 0."""

    reason: str


@dataclass(frozen=True)
class DrainRequested:
    """This node leaves; the others train on."""

    deadline_s: float | None
    """Seconds that it has for that; None: as long as it takes."""


@dataclass(frozen=True)
class NoticeReceived:
    """This machine is about to be taken away (a preemption notice)."""

    deadline_s: float
    """Monotonic time at which it goes."""
    reason: str
    """Who says so, in words."""


@dataclass(frozen=True)
class CheckpointAdvised:
    """This machine may be taken away later: a hint, without a deadline."""

    reason: str


@dataclass(frozen=True)
class LeaseKept:
    """The store confirmed this node's lease: a keepalive, or a new one after a loss."""

    deadline_s: float
    """Monotonic time up to which it holds, counted from before the request was sent."""


@dataclass(frozen=True)
class TimerFired:
    """The moment asked for by ``SetTimer`` has come (or passed)."""


NodeEvent = (
    NodeStarted
    | WorkerSpawned
    | SpawnFailed
    | WorkerConnected
    | WorkerBecameReady
    | WorkerBroke
    | WorkerFormed
    | WorkerCommitted
    | WorkerCheckpointed
    | WorkerFaulted
    | WorkerLeft
    | WorkerExited
    | WorkerHung
    | WorkerMisbehaved
    | GenerationStuck
    | WaitsChanged
    | QuarantineCleared
    | PlanSeen
    | JobSeen
    | StopRequested
    | DrainRequested
    | NoticeReceived
    | CheckpointAdvised
    | LeaseKept
    | TimerFired
)

# --- events of the leader (core.leader) -----------------------------------------------------


@dataclass(frozen=True)
class LeaderElected:
    """This node holds the leader key; the view is what was read after that."""

    members: tuple[MemberRecord, ...]
    plan: Plan | None
    job: JobRecord
    newest_known_generation: int
    """max(persisted, every reachable manifest's, every member's): the next number is above it."""


@dataclass(frozen=True)
class LeaderLost:
    """The leader key is not this node's any more: nothing is decided here until it is elected again."""


@dataclass(frozen=True)
class CollectivesEnded:
    """A collective with every rank of this generation has ended, as a worker of this node saw it."""

    generation: int


@dataclass(frozen=True)
class StoreReturned:
    """This node has renewed its lease after its deadline: the store was away, for it or for everybody."""


@dataclass(frozen=True)
class MembersChanged:
    """All member records under a live lease, as of one revision."""

    members: tuple[MemberRecord, ...]


@dataclass(frozen=True)
class PlanChanged:
    """The ``generation`` key as of one revision (also the answer to our own publish)."""

    plan: Plan


@dataclass(frozen=True)
class JobChanged:
    """The ``job`` key as of one revision (also after our own writes)."""

    job: JobRecord


@dataclass(frozen=True)
class ProbeAnswered:
    """Answer to ``ProbeMembers``: who answered, who is gone, who kept silent."""

    probe: int
    answering: tuple[WorkerKey, ...]
    gone: tuple[WorkerKey, ...]
    silent: tuple[WorkerKey, ...]


@dataclass(frozen=True)
class PublishRefused:
    """The compare-and-swap lost: somebody else wrote first; the new value comes as an event."""

    generation: int
    reason: str


LeaderEvent = (
    LeaderElected
    | LeaderLost
    | CollectivesEnded
    | StoreReturned
    | MembersChanged
    | PlanChanged
    | JobChanged
    | ProbeAnswered
    | PublishRefused
    | TimerFired
)
