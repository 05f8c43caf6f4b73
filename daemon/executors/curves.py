"""Curves for TensorBoard: one point per committed iteration, whatever happens to its writer.

The journal is the truth. The supervisor of the node that had rank 0 in an iteration writes its point,
so there is exactly one writer. Whoever begins to write (a new supervisor, after a restore, or when
rank 0 moves here) compares what the files end with to the journal, cuts what does not hold any more,
and adds what is missing.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

import structlog

from rallypoint.daemon.executors import eventfile
from rallypoint.daemon.executors.lineage import JournalTail, Line
from rallypoint.daemon.shared.figures import tag

_log = structlog.get_logger(__name__)
_PREFIX: Final = "events.out.tfevents."
_SUFFIX: Final = ".rallypoint"
_GENERATION: Final = "generation"
_TOTAL_S: Final = "tot_time"


def values_of(line: Line, total_s: float) -> dict[str, float]:
    """All tags of a committed iteration; ``total_s`` is the time of all iterations up to it."""
    samples = sum(rank.env_steps for rank in line.ranks)
    values = {tag(name): value for name, value in line.metrics.items() if value is not None}
    return {
        **values,
        **({"fps": samples / line.wall_s} if line.wall_s > 0 else {}),
        "tot_timesteps": line.env_steps_total,
        _TOTAL_S: total_s,
        _GENERATION: line.generation,
        "world_size": len(line.ranks),
        "samples": samples,
    }


class Curves:
    """Writes the event files of a directory from the journal, as far as this node is their writer."""

    def __init__(self, directory: Path, journal: Path, *, job: str, node: str) -> None:
        """Files of other jobs may lie in the directory; they are left alone."""
        self._directory = directory
        self._suffix = f".{job}{_SUFFIX}"
        self._tail = JournalTail(journal)
        self._node = node
        self._path: Path | None = None
        """The file that this writer goes on with; None: look at the directory first."""
        self._newest = 0
        """Iteration of the newest point; 0: look at the directory first."""
        self._total_s = 0.0
        self._failed = False

    def follow(self) -> None:
        """Write the points of everything that the journal has got since the last call. What cannot be
        written is logged, and written by a later call; training goes on."""
        try:
            for line in self._tail.read():
                self._take(line)
        except OSError as error:
            self._path = None
            if not self._failed:
                _log.error("curve_write_failed", path=str(self._directory), error=str(error))
            self._failed = True
        else:
            self._failed = False

    def _take(self, line: Line) -> None:
        if line.event == "generation":
            if line.restore:
                self._path, self._newest = None, 0
        elif line.event == "iteration":
            if line.ranks[0].node != self._node:
                self._path = None  # another node's supervisor writes
            elif line.iteration <= self._newest:
                return  # there already: to look at the files again for each would take for ever
            elif self._path is None:
                self._begin()
            else:
                self._write(self._path, line)

    def _begin(self) -> None:
        """Make the directory agree with the journal, up to its newest iteration."""
        self._newest, self._total_s = self._cut()
        lineage = self._tail.lineage(since=self._newest)
        missing = [line for number, line in sorted(lineage.items()) if number > self._newest]
        if not missing:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._new_path()
        path.write_bytes(eventfile.opening(missing[0].unix_s, missing[0].iteration))
        for line in missing:
            self._write(path, line)
        self._path = path

    def _cut(self) -> tuple[int, float]:
        """Cut points that the journal does not have. The newest that is left, and its total time."""
        lineage: dict[int, Line] = {}
        for path in reversed(self._files()):
            for point in eventfile.read(path):
                if point.step < min(lineage, default=sys.maxsize):
                    lineage = self._tail.lineage(since=point.step)
                line = lineage.get(point.step)
                if line is not None and line.generation == point.values.get(_GENERATION):
                    if point.end < path.stat().st_size:
                        os.truncate(path, point.end)
                    return point.step, point.values.get(_TOTAL_S, 0.0)
            path.unlink()
        return 0, 0.0

    def _files(self) -> list[Path]:
        """In the order in which they were begun, which is that of their names."""
        found = self._directory.glob(f"{_PREFIX}*")
        return sorted(path for path in found if path.name.endswith(self._suffix))

    def _new_path(self) -> Path:
        """A file behind all others."""
        files = self._files()
        newest = int(files[-1].name.removeprefix(_PREFIX).split(".")[0]) if files else 0
        number = max(int(time.time()), newest + 1)
        return self._directory / f"{_PREFIX}{number:010d}.{self._node}.{os.getpid()}{self._suffix}"

    def _write(self, path: Path, line: Line) -> None:
        self._total_s += line.wall_s
        values = values_of(line, self._total_s)
        with path.open("ab") as file:
            file.write(eventfile.scalars(line.unix_s, line.iteration, values))
        self._newest = line.iteration
