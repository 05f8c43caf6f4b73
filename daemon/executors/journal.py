"""``DIR/journal.jsonl``: one line per formed generation, per committed iteration, and per membership
change once all of its members train.

Every member reports each committed iteration; the first report is written, the others must agree
with it. A generation that restores a checkpoint winds back: lines that follow it supersede earlier
ones of the same iterations.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from rallypoint.daemon.executors.accounting import Change
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import RECORDED
from rallypoint.daemon.shared.messages import Committed, Formed, RankRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey

_log = structlog.get_logger(__name__)
_KEPT: Final = 64
"""Newest iterations whose hash is kept to compare late reports with."""
_TAIL_BYTES: Final = 2**20

Outcome = Literal["new", "duplicate", "conflict", "gap", "stale"]
"""new: written. duplicate: an equal report came before. conflict: an earlier report of this iteration
has another hash. gap: written, but the iteration before it is missing. stale: of a lineage that a
restore has superseded."""


class Share(msgspec.Struct, frozen=True):
    """What one rank put into an iteration, in a line of the journal."""

    node: str
    slot: int
    incarnation: int
    env_steps: int

    def record(self) -> RankRecord:
        key = WorkerKey(self.node, self.slot, self.incarnation)
        return RankRecord(key=key, blocks=(), env_steps=self.env_steps)


class Line(msgspec.Struct, frozen=True):
    """A line of the journal, as far as the next supervisor must know it."""

    event: str
    generation: int
    iteration: int = 0
    state_hash: str = ""
    cause: str = ""
    source: WorkerKey | None = None
    ranks: tuple[Share, ...] = ()
    env_steps_total: int = 0
    metrics: dict[str, float] = {}


@dataclass
class Journal:
    """Appends to the file; a line is handed to the kernel before the call returns."""

    path: Path
    on_growth: Callable[[], None] = lambda: None
    """Called after each line, and at the end."""
    iteration: int = 0
    """Newest committed iteration of the present lineage."""
    _hashes: dict[int, str] = field(default_factory=dict)
    _lineage: int = 0
    """Generation of the newest restore."""
    _begins: int | None = None
    """Iteration that it restored; None: not known to this life."""
    _sources: dict[int, WorkerKey] = field(default_factory=dict)
    """Source by generation, of the newest ones."""
    _generation: int = 0
    """Newest generation that was written."""
    _recovered: int = 0
    """Newest generation whose recovery was written."""

    def __post_init__(self) -> None:
        torn = self.path.exists() and not _ends_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if torn:  # the last life died while it wrote
            self._file.write("\n")

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._file.fileno()).st_size

    def resume(self, lineage: int, since_bytes: int) -> list[Line]:
        """Go on where a killed supervisor stopped: ``lineage`` is the newest generation that restored.
        Returns the lines that the file has from byte ``since_bytes`` on."""
        begin = max(0, min(since_bytes, self.size_bytes - _TAIL_BYTES))
        with self.path.open("rb") as file:
            file.seek(begin)
            tail = file.read()
        self._lineage = lineage
        found = []
        for raw in tail.splitlines(keepends=True):
            line = _line(raw)
            if line is not None:
                self._follow(line)
                if begin >= since_bytes:
                    found.append(line)
            begin += len(raw)
        return found

    def _follow(self, line: Line) -> None:
        if line.event == "iteration" and line.generation >= self._lineage:
            self._hashes[line.iteration] = line.state_hash
            self._hashes.pop(line.iteration - _KEPT, None)
            self.iteration = line.iteration
        elif line.event == "generation" and line.generation == self._lineage:
            self.iteration = line.iteration
        if line.source is not None:
            self._note_source(line.generation, line.source)
        if line.event == "generation":
            self._generation = line.generation
        elif line.event == "recovery":
            self._recovered = line.generation

    def knows(self, generation: int) -> bool:
        """Whether this formed generation is written already."""
        return generation <= self._generation

    def generation(self, plan: Plan, formed: Formed, config: Config) -> bool:
        """Write a formed generation, once; where a lineage begins, with what is trained, so that the
        file alone is enough to train it again. False when it starts before an iteration that was reported
        committed although it restores nothing: then a committed iteration was lost."""
        if self.knows(plan.generation):
            return True
        self._generation = plan.generation
        if plan.restore:
            self._lineage, self._begins = plan.generation, formed.iteration
            self._hashes = {i: h for i, h in self._hashes.items() if i <= formed.iteration}
        mine = {m.key for m in plan.members if m.key.node == config.node.name}
        if plan.restore or mine.isdisjoint(plan.survivors):
            self.iteration = formed.iteration  # others may have gone on while this node was away
        self._note_source(plan.generation, formed.source)
        self._append(
            {
                "event": "generation",
                "generation": plan.generation,
                "kind": plan.kind,
                "cause": plan.cause,
                "restore": plan.restore,
                "hold": plan.hold,
                "world_size": plan.world_size,
                "members": [
                    {**_key(m.key), "rank": m.rank, "blocks": m.blocks} for m in plan.members
                ],
                "source": _key(formed.source),
                "iteration": formed.iteration,
                "rolled_back": formed.rolled_back,
                "state_hash": formed.state_hash,
                "config": _trained(config) if plan.restore else None,
                "warm_start": plan.warm_start if plan.restore else None,
            }
        )
        return formed.iteration >= self.iteration

    def commit(self, message: Committed) -> Outcome:
        """Write a committed iteration, once."""
        if message.generation < self._lineage:
            return "stale"
        known = self._hashes.get(message.iteration)
        if known is not None:
            return "duplicate" if known == message.state_hash else "conflict"
        if message.iteration <= self.iteration:
            return "duplicate"
        outcome: Outcome = "new" if message.iteration == self.iteration + 1 else "gap"
        self._hashes[message.iteration] = message.state_hash
        self._hashes.pop(message.iteration - _KEPT, None)
        self.iteration = message.iteration
        source = self._sources.get(message.generation)
        self._append(
            {
                "event": "iteration",
                "generation": message.generation,
                "iteration": message.iteration,
                "world_size": len(message.ranks),
                "ranks": [
                    {
                        **_key(rank.key),
                        "blocks": rank.blocks,
                        "dropped": rank.dropped,
                        "cut": rank.cut,
                        "env_steps": rank.env_steps,
                    }
                    for rank in message.ranks
                ],
                "source": _key(source) if source is not None else None,
                "state_hash": message.state_hash,
                "how": message.how,
                "env_steps_total": message.env_steps_total,
                "wall_s": message.wall_s,
                "metrics": message.metrics,
            }
        )
        return outcome

    def cut(self, message: Committed) -> list[int]:
        """Env blocks that began new episodes for this iteration although the job was under way."""
        if message.iteration - 1 == self._begins:
            return []
        return sorted(block for rank in message.ranks for block in rank.cut)

    def recovery(self, change: Change) -> bool:
        """Write where the time of a change went: seconds of its phases, and the moments themselves
        (CLOCK_MONOTONIC of this host, so that a measurement from outside can be joined to them).
        False when it is written already."""
        if change.plan.generation <= self._recovered:
            return False
        self._recovered = change.plan.generation
        self._append(
            {
                "event": "recovery",
                "generation": change.plan.generation,
                "kind": change.plan.kind,
                "cause": change.plan.cause,
                "seconds": change.seconds(),
                "noticed_s": change.noticed_s,
                "decided_s": change.decided_s,
                "published_s": change.published_s,
                "stepped": [{**_key(m.key), "at_s": m.at_s} for m in change.stepped.values()],
            }
        )
        return True

    def _note_source(self, generation: int, source: WorkerKey) -> None:
        self._sources = {**dict(list(self._sources.items())[-7:]), generation: source}

    def close(self) -> None:
        """What the disk has not taken until now is lost, and said: the run ends all the same."""
        self.on_growth()
        try:
            self._file.close()
        except OSError as error:
            _log.error("journal_write_failed", path=str(self.path), error=str(error))

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode({**line, "unix_s": time.time()}).decode() + "\n")
        self._file.flush()
        self.on_growth()


def _line(raw: bytes) -> Line | None:
    """A whole line; None for one that a killed supervisor did not end."""
    try:
        return msgspec.json.decode(raw, type=Line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _trained(config: Config) -> dict[str, Any]:
    """The sections that decide what is trained."""
    return {name: getattr(config, name) for name in RECORDED}


def _key(key: WorkerKey) -> dict[str, Any]:
    return {"node": key.node, "slot": key.slot, "incarnation": key.incarnation}


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"
