"""The state of one worker as the commit protocol sees it: live, snapshot and staging.

*live* is what training changes in place; *snapshot* is the newest committed state; *staging*
receives a broadcast, so that a peer that dies in one spoils nothing.
"""

from dataclasses import dataclass

import torch

from rallypoint.daemon.shared.messages import RankRecord
from rallypoint.trainer.elastic.copies import SnapshotCopies
from rallypoint.trainer.elastic.registry import PackedState, Scope, StateRegistry


@dataclass(frozen=True)
class CommitRecord:
    """What all ranks know of an iteration once its last collective has ended."""

    generation: int
    iteration: int
    env_steps_total: int
    ranks: tuple[RankRecord, ...]
    metrics: dict[str, float]
    stop: bool
    """Somebody asked to stop after this iteration."""
    newest_plan: int
    """Least over ranks of the newest plan that each had seen."""


class TrainingState:
    """Where this worker is, and the copies that let it go back."""

    def __init__(self, registry: StateRegistry) -> None:
        self.iteration = torch.zeros((), dtype=torch.int64)
        self.env_steps = torch.zeros((), dtype=torch.int64)
        registry.register(
            "counters",
            Scope.REPLICATED,
            lambda: {"iteration": self.iteration, "env_steps": self.env_steps},
        )
        self.registry = registry
        live = registry.shared()
        self.copies = SnapshotCopies(live)
        self.copies.fill_from(live)
        self.staging = PackedState(live)
        self.committed = 0
        self.prepared = 0
        self.last_formed = 0
        self.held: CommitRecord | None = None
        self.dirty = False
        """An update has begun: live is not the snapshot any more."""

    @property
    def snapshot(self) -> PackedState:
        """The newest committed state."""
        return self.copies.newest

    def live_hash(self) -> int:
        """Hash of the live state; uses staging as its scratch space."""
        self.staging.fill_from(self.registry.shared())
        return self.staging.hash()

    def prepare(self, record: CommitRecord) -> None:
        """Live is now the result of the last collective of ``record.iteration``."""
        self.iteration.fill_(record.iteration)
        self.env_steps.fill_(record.env_steps_total)
        self.prepared = record.iteration
        self.held = record

    def commit(self) -> CommitRecord:
        """The held result becomes the newest committed state."""
        if self.held is None:
            raise RuntimeError("commit without a held result: a programming error")
        record, self.held = self.held, None
        self.copies.fill_from(self.registry.shared())
        self.committed = record.iteration
        self.dirty = False
        return record

    def roll_back(self) -> None:
        """Live becomes the newest committed state again; whatever was prepared is dropped."""
        self.snapshot.load_into(self.registry.shared())
        self.prepared = self.committed
        self.held = None
        self.dirty = False

    def adopt_live(self) -> None:
        """Take the live state, as restored or as built, for committed."""
        self.copies.fill_from(self.registry.shared())
        self.committed = self.prepared = int(self.iteration)
        self.held = None
        self.dirty = False

    def adopt_staging(self) -> None:
        """Swap in what a broadcast brought."""
        self.staging.load_into(self.registry.shared())
        self.adopt_live()
