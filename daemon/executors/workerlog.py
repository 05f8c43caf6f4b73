"""The output file of a slot: appended by each life of its worker, bounded in size."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from rallypoint.daemon.shared.plan import WorkerKey

_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 12


class WorkerLog:
    """``worker-<slot>.log`` and one older file, ``worker-<slot>.log.1``."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        self._begin_bytes = 0

    @contextmanager
    def open_for(self, key: WorkerKey) -> Iterator[BinaryIO]:
        """The file, open for appending by a new life of the worker. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._older)
        with self._path.open("ab") as file:
            file.write(f"--- worker {key} starts ---\n".encode())
            file.flush()
            self._begin_bytes = file.tell()
            yield file

    def go_on(self) -> None:
        """The worker writes already, for a supervisor that is gone: its tail is what it writes on."""
        self._begin_bytes = self._path.stat().st_size if self._path.exists() else 0

    def rotate_if_large(self) -> None:
        """Copy and truncate: the worker appends, so it goes on at the new end. What it writes
        between the copy and the cut is lost; renaming would let it write into the old file."""
        if self._path.stat().st_size > self._max_bytes:
            shutil.copyfile(self._path, self._older)
            os.truncate(self._path, 0)
            self._begin_bytes = 0

    def tail(self) -> tuple[str, ...]:
        """The last lines that this life wrote."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = self._begin_bytes if self._begin_bytes <= size else 0
            file.seek(max(begin, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_TAIL_LINES:]
