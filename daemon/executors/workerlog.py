"""What workers print: a file for each life, bounded in size, and a bounded number of files. What other
processes of a run print is bounded alike.

A worker writes into its file itself: nothing that happens to the supervisor, and no amount of output,
makes it wait.
"""

import os
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from rallypoint.daemon.shared.config import LogSection
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 12
_COPY_BYTES: Final = 1 << 20

_log = structlog.get_logger(__name__)


class OutputFile:
    """What a process appends to, and what was cut from it last, ``….1``."""

    def __init__(self, path: Path, section: LogSection) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._max_bytes = section.worker_file_bytes
        self._said = False

    def cut_if_large(self) -> bool:
        """Move the end of a file that has grown past its bound into the older one, and empty it. The
        worker appends, so it goes on at the new end; what it writes between the two steps is lost
        (renaming the file would let it write into the old one for ever). Whether it was too large."""
        if not self._path.exists():
            return False
        try:
            size = self._path.stat().st_size
            if size <= self._max_bytes:
                return False
            try:
                self._keep_end(size)
            finally:  # also on a disk that is full: that is when it matters
                os.truncate(self._path, 0)
        except OSError as error:
            if not self._said:
                self._said = True
                text = (
                    f"{error.strerror}: what it printed before is lost, or the file goes on growing"
                )
                _log.error("worker_output_not_cut", path=str(self._path), error=text)
        return True

    def _keep_end(self, size: int) -> None:
        unfinished = self._older.with_suffix(".tmp")
        try:
            with self._path.open("rb") as file, unfinished.open("wb") as copy:
                file.seek(size - self._max_bytes)
                left = self._max_bytes
                while left and (block := file.read(min(left, _COPY_BYTES))):
                    copy.write(block)
                    left -= len(block)
            unfinished.replace(self._older)
        finally:
            unfinished.unlink(missing_ok=True)


class WorkerLog(OutputFile):
    """The output of one life: ``worker-<slot>-<incarnation>.log``."""

    def __init__(self, rundir: RunDir, section: LogSection, key: WorkerKey) -> None:
        super().__init__(rundir.worker_log(key), section)
        self._key = key
        self._max_lives = section.worker_files

    def open(self) -> BinaryIO:
        """The file, open for appending, and those of old lives of the slot removed. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._remove_old()
        return self._path.open("ab")

    def _remove_old(self) -> None:
        lives: dict[int, list[Path]] = {}
        for path in self._path.parent.glob(f"worker-{self._key.slot}-*.log*"):
            life = path.name.split("-")[2].partition(".")[0]
            if life.isdecimal() and int(life) != self._key.incarnation:
                lives.setdefault(int(life), []).append(path)
        for number in sorted(lives, reverse=True)[self._max_lives - 1 :]:
            for path in lives[number]:
                path.unlink(missing_ok=True)

    def tail(self) -> tuple[str, ...]:
        """The last lines that were written; none, where nothing can be read."""
        data = b""
        for path in (self._path, self._older):
            if len(data) < _TAIL_BYTES:
                data = _end_of(path, _TAIL_BYTES - len(data)) + data
        lines = data.decode(errors="replace").splitlines()
        return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]


def _end_of(path: Path, size_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            return file.read(size_bytes)
    except OSError:  # not there, or not readable: its end is quoted for convenience
        return b""
