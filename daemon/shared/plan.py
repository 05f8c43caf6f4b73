"""The plan of a generation: who is in it, with which rank and which env blocks.

A plan is immutable. Every retry is a new generation with a new number; numbers are never reused.
"""

from functools import cached_property
from typing import Literal

import msgspec

ChangeKind = Literal["forced", "planned"]
ChangeCause = Literal[
    "start", "worker_lost", "node_lost", "hang", "join", "drain", "notice", "scale", "store"
]
CHANGE_KINDS: tuple[ChangeKind, ...] = ("forced", "planned")
CHANGE_CAUSES: tuple[ChangeCause, ...] = (
    "start",
    "worker_lost",
    "node_lost",
    "hang",
    "join",
    "drain",
    "notice",
    "scale",
    "store",
)


class WorkerKey(msgspec.Struct, frozen=True, order=True):
    """One life of the process in one slot. A restarted worker has a new incarnation."""

    node: str
    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}#{self.incarnation}"


class PlannedWorker(msgspec.Struct, frozen=True):
    """A member of a generation."""

    key: WorkerKey
    rank: int
    host: str
    """Address of the worker's own TCPStore server (and of the probe that asks whether it lives)."""
    port: int
    blocks: tuple[int, ...]
    """Ids of the env blocks it owns, ascending. Block b holds global env ids [b*block, (b+1)*block)."""
    capacity_envs: int = 0
    """Most envs this worker can hold; 0 when it did not say."""


class Plan(msgspec.Struct, frozen=True, dict=True):
    """One agreed membership. Look-ups keep an index, which is no part of the value."""

    generation: int
    kind: ChangeKind
    cause: ChangeCause
    formed: int
    """``job.formed`` as the leader read it: who last formed an older generation is a newcomer."""
    restore: bool
    """True when no survivor lives: the holder of the newest verified checkpoint is the source."""
    hold: bool
    """Fewer than ``min_workers`` (or the job is paused): form, commit a checkpoint once, then wait
    for a newer plan with state and simulator warm."""
    commit_first: bool
    """Rank 0 commits the state under this generation's number before any iteration commits: set for
    a restoring generation and its successors until such a checkpoint exists."""
    budget_envs: int
    """Global env count asked for (``global`` budget), or envs per rank (``per_rank``)."""
    members: tuple[PlannedWorker, ...]
    """In rank order: survivors by seniority, newcomers after, so rank 0 is never a newcomer while
    a survivor lives."""
    survivors: tuple[WorkerKey, ...]
    """Members that the leader took for survivors; workers decide again from what they hold."""
    left_out: tuple[PlannedWorker, ...] = ()
    """Who may still hold the newest formed state, but is not let in: silent, or without a lease. They
    are asked before a later plan restores. Counts until this generation has formed."""
    wanted_workers: int = 0
    """World size that spares make up for at once; a loss does not lower it."""
    resumes: bool = False
    """The job has progress: without live state and without a readable checkpoint nothing begins."""
    lineage: int = 0
    """Number of the newest generation that restored, this one included: env rows that were saved in
    another lineage are not of this run any more."""
    warm_start: str | None = None
    """Checkpoint that gives the parameters where the job begins from nothing, as `JobRecord` has it."""
    iterations: int | None = None
    """Its members finish after this iteration, all at the same one; None: no bound."""
    env_steps: int | None = None
    """They finish at the first iteration that reaches this many env steps; None: no bound."""

    def reached(self, iteration: int, env_steps: int) -> bool:
        """Whether the job has come to its end with this progress."""
        return (self.iterations is not None and iteration >= self.iterations) or (
            self.env_steps is not None and env_steps >= self.env_steps
        )

    @property
    def starts(self) -> Literal["now", "safe_point"]:
        """When members leave the generation before: a forced change at once, a planned one at the
        next safe point that all have agreed on."""
        return "now" if self.kind == "forced" else "safe_point"

    @property
    def ends_below(self) -> int:
        """Generations below this number are over, whatever a member of one still waits for: a forced
        plan ends all before it, a planned one those before the newest formed (whoever is in one of
        them was cut off when others formed without it)."""
        return self.generation if self.kind == "forced" else self.formed

    @property
    def world_size(self) -> int:
        return len(self.members)

    def num_envs(self, block: int) -> int:
        """Global env count, with ``block`` envs in each env block."""
        return block * sum(len(member.blocks) for member in self.members)

    @property
    def rank0(self) -> PlannedWorker:
        return self.members[0]

    def find(self, key: WorkerKey) -> PlannedWorker | None:
        """The member with this key, or None."""
        return self._members_by_key.get(key)

    def lists(self, node: str) -> bool:
        """Whether a worker of this node is a member."""
        return node in self._nodes

    def address(self, key: WorkerKey) -> tuple[str, int] | None:
        """Host and port of a member, or of somebody left out; None for others."""
        member = self.find(key) or next((m for m in self.left_out if m.key == key), None)
        return None if member is None else (member.host, member.port)

    @cached_property
    def survivor_keys(self) -> frozenset[WorkerKey]:
        """`survivors` as a set."""
        return frozenset(self.survivors)

    @cached_property
    def _members_by_key(self) -> dict[WorkerKey, PlannedWorker]:
        return {member.key: member for member in self.members}

    @cached_property
    def _nodes(self) -> frozenset[str]:
        return frozenset(member.key.node for member in self.members)
