"""Orders that decisions give. Executors carry them out and report back as events."""

from dataclasses import dataclass
from typing import Literal

from rallypoint.daemon.core.records import JobState, MemberRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey


@dataclass(frozen=True)
class SetTimer:
    """Send ``TimerFired`` to the machine that asked, at this moment; replaces its earlier timer."""

    at_s: float


@dataclass(frozen=True)
class Explain:
    """A decision or a refusal in words, with the numbers: one log event, no effect."""

    event: str
    reason: str


# --- orders of a node ------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorker:
    """Start the process of a slot's next life; answered by ``WorkerSpawned`` or ``SpawnFailed``."""

    key: WorkerKey


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL to the worker's whole process group."""

    key: WorkerKey
    reason: str
    why: Literal["order", "hang", "protocol"] = "order"
    """hang: evidence of it and of its peers is saved before the kill. protocol: nothing that it still
    says is listened to."""


@dataclass(frozen=True)
class WriteMember:
    """Write this node's member record under its lease."""

    record: MemberRecord


@dataclass(frozen=True)
class SendPlan:
    """Tell a worker about a newer plan, whether or not that lists it."""

    key: WorkerKey
    plan: Plan


@dataclass(frozen=True)
class SendFormedMark:
    """Tell a worker that its generation is marked formed: its first iteration may end."""

    key: WorkerKey
    generation: int


@dataclass(frozen=True)
class SendStop:
    """Ask a worker to stop by agreement after an iteration."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class SendCheckpoint:
    """Ask rank 0 to commit the newest committed state now."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class SendLeave:
    """Ask a worker that nobody counts on to exit."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class ExitSupervisor:
    """Nothing is left to do here."""

    code: int
    reason: str


NodeAction = (
    SetTimer
    | Explain
    | StartWorker
    | KillWorker
    | WriteMember
    | SendPlan
    | SendFormedMark
    | SendStop
    | SendCheckpoint
    | SendLeave
    | ExitSupervisor
)

# --- orders of the leader ----------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeMembers:
    """Ask each worker's own port whether it lives; answer within ``bound_s`` as ``ProbeAnswered``."""

    probe: int
    targets: tuple[WorkerKey, ...]
    bound_s: float


@dataclass(frozen=True)
class PublishPlan:
    """Compare-and-swap the ``generation`` key from ``replaces`` (a generation, 0 = none) to this plan.
    ``restore`` plans also set ``job.restore_generation``, in the same transaction."""

    plan: Plan
    replaces: int


@dataclass(frozen=True)
class MarkFormed:
    """Write ``job.formed`` in one transaction that also compares ``generation``."""

    generation: int


@dataclass(frozen=True)
class RecordCheckpoint:
    """Write the newest verified checkpoint into the job's record, for whoever leads next."""

    checkpoint: tuple[int, int]


@dataclass(frozen=True)
class SetJobState:
    """Write the state of the job and why."""

    state: JobState
    reason: str


LeaderAction = (
    SetTimer | Explain | ProbeMembers | PublishPlan | MarkFormed | RecordCheckpoint | SetJobState
)
Action = NodeAction | LeaderAction
