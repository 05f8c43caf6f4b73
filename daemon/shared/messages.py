"""Messages on the control socket between a supervisor and its workers.

One frame is a 4-byte big-endian length followed by that many bytes of JSON. Every message carries
its ``type``; the first one of each side carries the protocol version. Unknown *fields* are ignored,
so that a newer peer can add some; an unknown type, a frame over ``MAX_FRAME_BYTES`` or a value of
the wrong type raises `ProtocolError`, which names what was wrong.
"""

import struct
from collections.abc import Iterator
from typing import Final, Literal, get_args

import msgspec

from rallypoint.daemon.shared.collectives import Count, Use
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.plan import Plan, WorkerKey

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 * 2**20
_HEADER = struct.Struct(">I")

TierName = Literal["url", "local"]
"""A place for checkpoints: ``checkpoint.url``, or the directory below the run's."""
TIERS: Final[tuple[str, ...]] = get_args(TierName)


class _Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    pass


# --- worker -> supervisor -------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """First message of a worker on a new connection (also after it reconnects to a new supervisor).

    The fields from ``ready`` on say what an earlier supervisor knew of this worker.
    """

    protocol: int = PROTOCOL_VERSION
    key: WorkerKey
    pid: int
    start_ticks: int
    """Start time of the process from /proc/self/stat field 22, so that a reused pid is noticed."""
    versions: dict[str, str]
    config_hash: str
    ready: "Ready | None" = None
    """What it said when it was ready; None: it is not ready yet."""
    formed: "Formed | None" = None
    """Its newest formed generation."""
    stepped: "Stepped | None" = None
    """Its newest first optimiser step."""
    broken_generation: int = 0
    """Newest generation that it reported broken."""
    committed: "Committed | None" = None
    """Its newest committed iteration."""
    checkpoint: "CheckpointDone | None" = None
    """The newest checkpoint that it committed itself."""


class Progress(_Message, frozen=True, kw_only=True):
    """What the worker is doing before it is ready, for people."""

    key: WorkerKey
    stage: str


class Ready(_Message, frozen=True, kw_only=True):
    """Env built, first step done, optimiser and kernels warm, store server bound."""

    key: WorkerKey
    host: str
    port: int
    device: str
    capacity_envs: int
    last_formed: int
    checkpoint: tuple[int, int] | None
    """(generation, iteration) of the newest verified checkpoint this worker can read."""


class Broken(_Message, frozen=True, kw_only=True):
    """A collective of this generation failed: a peer is gone, or the supervisor released us. Or this worker
    cannot hold the envs that the plan gives it."""

    key: WorkerKey
    generation: int
    phase: str
    error: str
    at_s: float
    """CLOCK_MONOTONIC seconds of this host."""
    capacity_envs: int = 0
    """Most envs that it can hold, where it has learned that by this; else 0."""


class Formed(_Message, frozen=True, kw_only=True):
    """The hash compare of this generation agreed and the state is swapped in."""

    key: WorkerKey
    generation: int
    state_hash: str
    source: WorkerKey
    iteration: int
    rolled_back: bool
    seconds: dict[str, float]
    """Phases: release, plan, group, sync, envs (seconds of this worker)."""
    at_s: float


class Stepped(_Message, frozen=True, kw_only=True):
    """First optimiser step of this generation: the end of a recovery."""

    key: WorkerKey
    generation: int
    at_s: float
    envs_s: float = 0.0
    """Seconds it took, since the generation formed and until this step, to hold envs."""
    envs_owed: bool = False
    """A rollout in hand was used first: the planned envs are not held yet, and `EnvsHeld` follows."""


class EnvsHeld(_Message, frozen=True, kw_only=True):
    """The planned envs are held, only after the first optimiser step."""

    key: WorkerKey
    generation: int
    envs_s: float
    """Seconds it took since the generation formed, those of `Stepped.envs_s` with them."""


class RankRecord(msgspec.Struct, frozen=True):
    """What one rank put into a committed iteration."""

    key: WorkerKey
    blocks: tuple[int, ...]
    """Blocks whose rollout was used."""
    dropped: tuple[int, ...] = ()
    env_steps: Count = 0
    cut: tuple[int, ...] = ()
    """Blocks used whose envs began a new episode for this iteration, at the phase that is drawn for
    it: new ones, and those whose rows were lost with a process or with a rollout that was dropped."""


class Committed(_Message, frozen=True, kw_only=True):
    """Iteration committed: this worker has left the barrier (or applied the held result)."""

    key: WorkerKey
    generation: int
    iteration: int
    env_steps_total: int
    state_hash: str
    ranks: tuple[RankRecord, ...]
    metrics: dict[str, float]
    """Global figures (sums or count-weighted means), the same on every rank."""
    activity: dict[str, float]
    """Seconds of this worker since its last report, by activity."""
    redone_s: float = 0.0
    """How many of them made what was thrown away: an update that was rolled back, a rollout not used."""
    wall_s: float = 0.0
    """Seconds since the commit before, or since its generation formed: of the generation alone."""
    collectives: dict[str, Use] = {}
    """What it used since its last report, by name."""
    how: str = "barrier"
    """``barrier``, or ``held`` when the survivors applied the result they all held."""


class StepsLost(_Message, frozen=True, kw_only=True):
    """Env steps this worker collected and will not use."""

    key: WorkerKey
    reason: Literal["dropped", "cut"]
    env_steps: Count


class HashMismatch(_Message, frozen=True, kw_only=True):
    """State hashes differ between ranks; all roll back to the agreed snapshot."""

    key: WorkerKey
    generation: int
    iteration: int
    """The newest committed one, to which they roll back."""
    hashes: tuple[str, ...]


class AskCommit(_Message, frozen=True, kw_only=True):
    """May this worker put a manifest? Asked right before the put; no answer means no."""

    key: WorkerKey
    ask: int
    generation: int
    iteration: int


class CheckpointDone(_Message, frozen=True, kw_only=True):
    """A checkpoint is committed, read back and verified."""

    key: WorkerKey
    generation: int
    iteration: int
    path: str
    stall_s: float
    persist_s: float
    size_bytes: Count
    tier: TierName | None = None
    """Which tier took it; None: an earlier version does not say."""
    passed_over: Count = 0
    """Saves of this tier that were due since the one before, and that a newer one took the place of: they
    waited for one that took too long."""


class CheckpointFailed(_Message, frozen=True, kw_only=True):
    """A checkpoint was not committed, and why; training goes on."""

    key: WorkerKey
    generation: int
    iteration: int
    error: str
    tier: TierName | None = None
    """Which tier did not take it; None: nothing was to be committed."""


class Restored(_Message, frozen=True, kw_only=True):
    """The source read a checkpoint; ``skipped`` lists newer ones that did not verify, with why."""

    key: WorkerKey
    generation: int
    iteration: int
    path: str
    skipped: tuple[str, ...]


class Fault(_Message, frozen=True, kw_only=True):
    """The worker is about to exit because of an exception of its program."""

    key: WorkerKey
    generation: int
    iteration: int
    fingerprint: str
    """``module.Type at file:line``, equal for the same error on every rank."""
    traceback: str


class Leaving(_Message, frozen=True, kw_only=True):
    """The worker exits by agreement: the job finished, was stopped, or this worker was drained."""

    key: WorkerKey
    generation: int
    iteration: int
    reason: str
    """``finished``, ``stopped``, ``drained`` or ``orphaned``."""


WorkerMessage = (
    Hello
    | Progress
    | Ready
    | Broken
    | Formed
    | Stepped
    | EnvsHeld
    | Committed
    | StepsLost
    | HashMismatch
    | AskCommit
    | CheckpointDone
    | CheckpointFailed
    | Restored
    | Fault
    | Leaving
)

# --- supervisor -> worker -------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to `Hello`."""

    protocol: int = PROTOCOL_VERSION
    supervisor_incarnation: int
    job_uid: str = ""
    """Identity of the job, for the manifests of its checkpoints."""
    formed: int
    plan: Plan | None
    heard: int | None = None
    """How many messages of this worker, Hello not counted, have been taken in its life, by whatever
    supervisor: it sends again what it sent after them. None: not known."""


class PlanPublished(_Message, frozen=True, kw_only=True):
    """A newer plan. A forced one also releases whatever an older generation waits in."""

    plan: Plan


class FormedMark(_Message, frozen=True, kw_only=True):
    """``job.formed`` has reached this generation: its first iteration may end."""

    generation: int


class CommitAnswer(_Message, frozen=True, kw_only=True):
    """Answer to `AskCommit`; the reason says why not."""

    ask: int
    allowed: bool
    reason: str


class StopAfterIteration(_Message, frozen=True, kw_only=True):
    """Stop by agreement: the flag travels in the next last collective; all leave together."""

    reason: str
    """``stopped`` (checkpoint, then exit 0) or ``paused``."""


class CommitNow(_Message, frozen=True, kw_only=True):
    """Rank 0 is to commit the newest committed state without waiting for a period to be over."""

    reason: str


class Leave(_Message, frozen=True, kw_only=True):
    """This worker is in no plan any more and should exit."""

    reason: str


SupervisorMessage = (
    Welcome | PlanPublished | FormedMark | CommitAnswer | StopAfterIteration | CommitNow | Leave
)

_encoder = msgspec.json.Encoder()
_from_worker = msgspec.json.Decoder(WorkerMessage)
_from_supervisor = msgspec.json.Decoder(SupervisorMessage)


def encode(message: WorkerMessage | SupervisorMessage) -> bytes:
    """One frame, header included."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is over the {MAX_FRAME_BYTES}-byte bound"
        )
    return _HEADER.pack(len(body)) + body


def decode_from_worker(body: bytes) -> WorkerMessage:
    """Raises `ProtocolError` for anything that is not a message of a worker."""
    try:
        return _from_worker.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"control socket: not a worker's message: {error}") from error


def decode_from_supervisor(body: bytes) -> SupervisorMessage:
    """Raises `ProtocolError` for anything that is not a message of a supervisor."""
    try:
        return _from_supervisor.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"control socket: not a supervisor's message: {error}") from error


class FrameReader:
    """Cuts a byte stream into frame bodies; holds at most one partial frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by ``data``. Raises `ProtocolError` for a frame over the bound."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(
                    f"control socket: a frame of {size} bytes is over the {MAX_FRAME_BYTES}-byte bound"
                )
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield body
