"""What members, the leader and the job write into the membership store.

Keys are below ``/rallypoint/<job>/``: ``members/<node>``, ``leader``, ``generation``, ``job``.
Values are JSON. Member records are written when they change, never per iteration.
"""

from typing import Any, Literal

import msgspec

WorkerState = Literal[
    "starting",
    "warming",
    "ready",
    "training",
    "rebuilding",
    "waiting",
    "draining",
    "stopped",
    "lost",
    "quarantined",
]
WORKER_STATES: tuple[WorkerState, ...] = (
    "starting",
    "warming",
    "ready",
    "training",
    "rebuilding",
    "waiting",
    "draining",
    "stopped",
    "lost",
    "quarantined",
)
JobState = Literal["running", "paused", "finished", "failed"]
ShownJobState = Literal["starting", "running", "holding", "paused", "finished", "failed"]
SHOWN_JOB_STATES: tuple[ShownJobState, ...] = (
    "starting",
    "running",
    "holding",
    "paused",
    "finished",
    "failed",
)
"""What operators see: the stored ones, and what follows from the members."""


class FaultRecord(msgspec.Struct, frozen=True):
    """The newest exception of a slot's program, kept over restarts until the slot gets past it."""

    incarnation: int
    """Life that raised it."""
    generation: int
    """0: before it was in any."""
    iteration: int
    fingerprint: str
    times: int
    """How often in a row this slot raised this very fingerprint at this very iteration."""
    traceback: str
    """Its end, at most ``TRACEBACK_CHARS``."""


TRACEBACK_CHARS = 4000


class SlotRecord(msgspec.Struct, frozen=True):
    """One slot as its node last saw it."""

    slot: int
    incarnation: int
    state: WorkerState
    host: str = ""
    port: int = 0
    device: str = ""
    capacity_envs: int = 0
    ready_order: int = 0
    """Counts up per node; seniority among newcomers. 0 until ready."""
    last_formed: int = 0
    broken_generation: int = 0
    """Newest generation that this worker reported broken while it lives itself."""
    checkpoint: tuple[int, int] | None = None
    """(generation, iteration) of the newest verified checkpoint this worker can read."""
    blocks: tuple[int, ...] = ()
    """Env blocks it holds: those of the last generation it formed."""
    left: str = ""
    """Why the worker left by agreement: ``finished``, ``stopped``, ``drained``; "" while it has not."""
    fault: FaultRecord | None = None
    hung_incarnation: int = 0
    """Newest life of this slot that was ended because it hung; 0: none was."""
    stuck_generation: int = 0
    """Newest generation in which this life waited with all others while nothing moved."""


class WaitRecord(msgspec.Struct, frozen=True):
    """A worker waits for the other members, and has for long: other nodes compare theirs with it."""

    slot: int
    incarnation: int
    generation: int
    collective: int
    """How many collectives of that generation it has entered."""
    waited_s: float
    """How long it had waited there when this was first said, in seconds."""


class MemberRecord(msgspec.Struct, frozen=True):
    """One supervisor, under its lease."""

    node: str
    incarnation: int
    advertise: str
    slots: tuple[SlotRecord, ...]
    draining: bool = False
    deadline_s: float | None = None
    """Seconds left until the node goes, when it said so (a notice)."""
    drain_cause: Literal["", "drain", "notice"] = ""
    """Why it drains."""
    versions: dict[str, str] = {}
    job_uid: str = ""
    """The job that this node takes part in; "" where it does not know yet."""
    config_hash: str = ""
    checkpoint: tuple[int, int] | None = None
    """(generation, iteration) of the newest verified checkpoint that workers of this node can read,
    whichever of its workers, living or gone, said so."""
    newest_generation: int = 0
    """Newest generation number that this node has ever seen; the next one is above it."""
    port: int = 0
    """Port on ``advertise`` where connections are accepted while this supervisor lives; 0: none."""
    quarantined: str = ""
    """Why its workers are not let in for now; "" while they may be."""
    waits: tuple[WaitRecord, ...] = ()
    """Its workers that have waited for others for longer than is usual."""


class JobRecord(msgspec.Struct, frozen=True):
    """The job, which survives every process."""

    uid: str
    config_hash: str
    versions: dict[str, str]
    iteration: int = 0
    env_steps: int = 0
    formed: int = 0
    """Newest formed generation."""
    restore_generation: int = 0
    """Newest generation that restored from a checkpoint (or started from scratch)."""
    state: JobState = "running"
    """Paused: an operator wants it to hold, whoever is there."""
    reason: str = ""
    checkpoint: tuple[int, int] | None = None
    """(generation, iteration) of the newest verified checkpoint that any member ever registered: its
    writer may be gone, and so may be the leader that heard of it."""
    warm_start: str | None = None
    """Checkpoint that gave the first parameters; None: none, they were drawn."""
    values: dict[str, Any] = {}
    """Values by ``section.key`` that hold for all nodes until the job is started anew
    (`daemon.shared.common`)."""
    clears: dict[str, tuple[int, int | None]] = {}
    """Nodes that an operator, anywhere, asked to clear their quarantine: how often, and of which slot (None:
    of all) the last time."""
    workers: int | None = None
    """World size that an operator asked for (`rallypoint scale`); None: as many as there are."""
