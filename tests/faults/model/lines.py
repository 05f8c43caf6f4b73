"""The records that a fault test reads back: lines of the journal, and of workers' ledgers."""

from pathlib import Path
from typing import NamedTuple

import msgspec


class Life(NamedTuple):
    """One incarnation of the worker in one slot."""

    slot: int
    incarnation: int


class Member(msgspec.Struct, frozen=True):
    """A worker as the journal names it."""

    slot: int
    incarnation: int

    @property
    def life(self) -> Life:
        return Life(self.slot, self.incarnation)


class Share(Member, frozen=True):
    """What one rank put into an iteration."""

    blocks: tuple[int, ...]
    env_steps: int


class GenerationLine(msgspec.Struct, frozen=True, tag="generation", tag_field="event"):
    """A generation that formed and was marked."""

    generation: int
    kind: str
    restore: bool
    iteration: int
    members: tuple[Member, ...]
    source: Member
    state_hash: str


class IterationLine(msgspec.Struct, frozen=True, tag="iteration", tag_field="event"):
    """A committed iteration."""

    generation: int
    iteration: int
    ranks: tuple[Share, ...]
    state_hash: str
    env_steps_total: int
    metrics: dict[str, float]


class RecoveryLine(msgspec.Struct, frozen=True, tag="recovery", tag_field="event"):
    """Where the time of a membership change went."""

    generation: int
    kind: str
    cause: str
    seconds: dict[str, float | None]


JournalLine = GenerationLine | IterationLine | RecoveryLine


class Collected(msgspec.Struct, frozen=True, tag="collected", tag_field="event"):
    """A worker collected a whole rollout."""

    iteration: int
    env_ids: tuple[int, ...]
    env_steps: int
    digest: str


class Committed(msgspec.Struct, frozen=True, tag="committed", tag_field="event"):
    """A worker committed an iteration. ``entered`` counts, by env id, the mini-batches that held its
    trajectory since the update was last begun."""

    iteration: int
    generation: int
    entered: dict[int, int]
    digest: str
    state_hash: str


class Formed(msgspec.Struct, frozen=True, tag="formed", tag_field="event"):
    """A worker formed a generation."""

    generation: int
    iteration: int


class Lost(msgspec.Struct, frozen=True, tag="lost", tag_field="event"):
    """A worker dropped env steps that it had collected."""

    env_steps: int


LedgerLine = Collected | Committed | Formed | Lost


class Ledger(msgspec.Struct, frozen=True):
    """The books of one life of a worker."""

    lines: tuple[LedgerLine, ...]
    collected_env_steps: int
    """As counted on its page, warm-up excluded."""

    @property
    def commits(self) -> list[Committed]:
        return [line for line in self.lines if isinstance(line, Committed)]

    @property
    def rollouts(self) -> list[Collected]:
        return [line for line in self.lines if isinstance(line, Collected)]

    @property
    def dropped_env_steps(self) -> int:
        return sum(line.env_steps for line in self.lines if isinstance(line, Lost))

    def formed_before(self, generation: int) -> int:
        """Newest generation older than this one that it formed; 0 for none."""
        return max(
            (
                x.generation
                for x in self.lines
                if isinstance(x, Formed) and x.generation < generation
            ),
            default=0,
        )


_journal = msgspec.json.Decoder(JournalLine)
_ledger = msgspec.json.Decoder(LedgerLine)


def read_journal(path: Path) -> tuple[JournalLine, ...]:
    """All whole lines; the last one may still be under way."""
    return tuple(_journal.decode(line) for line in _whole_lines(path))


def read_ledger_lines(path: Path) -> tuple[LedgerLine, ...]:
    """All whole lines; none when the file does not exist: nothing was collected."""
    return tuple(_ledger.decode(line) for line in _whole_lines(path)) if path.exists() else ()


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]
