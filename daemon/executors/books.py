"""What a supervisor has counted, kept where its own SIGKILL cannot take it: ``DIR/books.page``.

Written after every message of a worker, so it must cost next to nothing: a mapped file of two halves,
of which the older is overwritten. A half that was torn has a wrong checksum, and the other one counts.
"""

import mmap
import struct
import zlib
from pathlib import Path
from typing import Final

import msgspec

from rallypoint.daemon.executors.wallledger import WallBooks
from rallypoint.daemon.shared.plan import WorkerKey

_HEADER: Final = struct.Struct("<QII")  # number of the write, length, CRC-32 of the content
_HALF_BYTES: Final = 256 * 1024
_Number = tuple[WorkerKey, int]


class CheckpointFact(msgspec.Struct, frozen=True):
    """The newest checkpoint that is known to be committed and verified."""

    generation: int
    iteration: int
    path: str
    at_unix_s: float

    @property
    def order(self) -> tuple[int, int]:
        """(generation, iteration), by which readers order."""
        return self.generation, self.iteration


class Total(msgspec.Struct, frozen=True):
    """Value of one counter of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Everything counted so far. Unknown fields are ignored: a newer version may have written them."""

    heard: tuple[_Number, ...] = ()
    """Messages taken, by worker."""
    totals: tuple[Total, ...] = ()
    accounted: tuple[_Number, ...] = ()
    """Env steps of each worker that are known to be used or lost."""
    dead: tuple[tuple[WorkerKey, int, str], ...] = ()
    """Workers whose env steps are not settled: how many they collected, and how they ended."""
    journal_bytes: int = 0
    """Size of the journal when this was written; what follows in it is not counted here."""
    env_steps: int = 0
    figures: dict[str, float] = {}
    checkpoint: CheckpointFact | None = None
    tiers: dict[str, float] = {}
    """Unix time of the newest commit to each tier of checkpoints."""
    wall: WallBooks | None = None
    """What is accounted for of each slot's time."""
    change: tuple[int, float, float, float] | None = None
    """The newest change: generation, and when it was noticed, decided, published (CLOCK_MONOTONIC)."""


class BooksFile:
    """The file. Raises OSError when it cannot be made."""

    def __init__(self, path: Path) -> None:
        size = 2 * _HALF_BYTES
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._writes = max(self._number(half) for half in (0, 1))

    def read(self) -> Books | None:
        """What was written last; None when that is nothing, or nothing that can be read."""
        for half in sorted((0, 1), key=self._number, reverse=True):
            number, length, checksum = self._header(half)
            begin = half * _HALF_BYTES + _HEADER.size
            content = self._map[begin : begin + min(length, _HALF_BYTES)]
            if number and zlib.crc32(content) == checksum:
                try:
                    return msgspec.json.decode(content, type=Books)
                except msgspec.MsgspecError:
                    return None  # of a version that counts differently
        return None

    def write(self, books: Books) -> None:
        """Replace the content. Books too large for the file (thousands of workers) are not kept."""
        content = msgspec.json.encode(books)
        if len(content) > _HALF_BYTES - _HEADER.size:
            return
        self._writes += 1
        begin = self._writes % 2 * _HALF_BYTES
        self._map[begin + _HEADER.size : begin + _HEADER.size + len(content)] = content
        _HEADER.pack_into(self._map, begin, self._writes, len(content), zlib.crc32(content))

    def close(self) -> None:
        self._map.close()

    def _header(self, half: int) -> tuple[int, int, int]:
        number, length, checksum = _HEADER.unpack_from(self._map, half * _HALF_BYTES)
        return number, length, checksum

    def _number(self, half: int) -> int:
        return self._header(half)[0]
