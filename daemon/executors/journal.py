"""``DIR/journal.jsonl``: one line per formed generation, per committed iteration, and per membership
change once all of its members train.

Every member reports each committed iteration; the first report is written, the others must agree
with it. A generation that restores a checkpoint winds back: lines that follow it supersede earlier
ones of the same iterations.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rallypoint.daemon.executors.accounting import Change
from rallypoint.daemon.shared.messages import Committed, Formed
from rallypoint.daemon.shared.plan import Plan, WorkerKey

_KEPT: Final = 64
"""Newest iterations whose hash is kept to compare late reports with."""

Outcome = Literal["new", "duplicate", "conflict", "gap", "stale"]
"""new: written. duplicate: an equal report came before. conflict: an earlier report of this iteration
has another hash. gap: written, but the iteration before it is missing. stale: of a lineage that a
restore has superseded."""


@dataclass
class Journal:
    """Appends to the file; a line is handed to the kernel before the call returns."""

    path: Path
    iteration: int = 0
    """Newest committed iteration of the present lineage."""
    _hashes: dict[int, str] = field(default_factory=dict)
    _lineage: int = 0
    """Generation of the newest restore."""
    _sources: dict[int, WorkerKey] = field(default_factory=dict)
    """Source by generation, of the newest ones."""

    def __post_init__(self) -> None:
        torn = self.path.exists() and not _ends_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if torn:  # the last life died while it wrote
            self._file.write("\n")

    def generation(self, plan: Plan, formed: Formed) -> bool:
        """Write a formed generation. False when it starts before an iteration that was reported
        committed although it restores nothing: then a committed iteration was lost."""
        if plan.restore:
            self._lineage = plan.generation
            self._hashes = {i: h for i, h in self._hashes.items() if i <= formed.iteration}
            self.iteration = formed.iteration
        self._sources = {**dict(list(self._sources.items())[-7:]), plan.generation: formed.source}
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
                        "env_steps": rank.env_steps,
                    }
                    for rank in message.ranks
                ],
                "source": _key(source) if source is not None else None,
                "state_hash": message.state_hash,
                "how": message.how,
                "env_steps_total": message.env_steps_total,
                "metrics": message.metrics,
            }
        )
        return outcome

    def recovery(self, change: Change) -> None:
        """Write where the time of a change went: seconds of its phases, and the moments themselves
        (CLOCK_MONOTONIC of this host, so that a measurement from outside can be joined to them)."""
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

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode({**line, "unix_s": time.time()}).decode() + "\n")
        self._file.flush()


def _key(key: WorkerKey) -> dict[str, Any]:
    return {"node": key.node, "slot": key.slot, "incarnation": key.incarnation}


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"
