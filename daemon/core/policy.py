"""What the decisions are told once, at their start. All times in monotonic seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NodePolicy:
    """Fixed facts and bounds of one node."""

    node: str
    """Name of this node, unique in the job."""
    incarnation: int
    """Life of this supervisor, counted up in its directory."""
    advertise: str
    """Address under which other nodes reach this one."""
    slots: int
    """Worker processes of this node: one per slot, numbered from 0."""
    first_incarnation: int
    """Worker incarnations start above this number, so that none of an earlier supervisor recurs."""
    stop_grace_s: float
    """How long workers may take to agree, checkpoint and leave, before they are killed."""
    adopt_s: float
    """How long an adopted worker may take to say Hello, before it is killed."""
    quarantine_after: int
    """A slot is quarantined when this many lives in a row crashed before they trained."""
    quarantine_cooldown_s: float
    """A quarantined slot gets one more life after this long."""
    versions: Mapping[str, str]
    """Versions written into the member record (rallypoint, torch, …)."""
    job_uid: str
    """The job that this node takes part in."""
    config_hash: str
    """Hash of the values that all nodes of the job share."""
    newest_generation: int
    """Newest generation number that this node knew of before it started."""
    alone: bool = True
    """There is no other node (embedded membership)."""
    port: int = 0
    """Port of this supervisor that others ask whether it lives; 0: none."""


@dataclass(frozen=True, kw_only=True)
class LeaderPolicy:
    """Fixed facts and bounds of the job, as its leader needs them."""

    budget: Literal["per_rank", "global"]
    """How ``num_envs`` counts."""
    num_envs: int
    """Envs per rank (``per_rank``) or in all (``global``); a multiple of ``block``."""
    block: int
    """Envs per env block."""
    min_workers: int
    """Below this world size the job holds."""
    max_workers: int
    """Largest world size."""
    coalesce_s: float
    """Losses within this time of the first are one change."""
    probe_s: float
    """Bound of a probe."""
    join_debounce_s: float
    """Newcomers within this time of the first enter together."""
    spares: int
    """This many warm workers are kept out, and let in at once after a loss."""
    detect_s: float
    """A new leader gives members this long to register again, before it takes them for lost. Who has no
    lease, and is waited for in a collective for as long, is lost."""
    witness_s: float
    """A collective that ended within this time shows that all of its generation live."""
    holder_wait_s: float
    """How long a restore waits for the node that holds a newer checkpoint, and for workers of an
    earlier generation that answer although they cannot train any more."""
    alone: bool
    """No other node can ever come (embedded membership)."""
    shared_checkpoints: bool
    """Every node can read every checkpoint; else only the node that registered it."""
    iterations: int | None = None
    """The job is finished after this iteration; None: no bound."""
    env_steps: int | None = None
    """The job is finished with the first iteration that reaches this many; None: no bound."""
