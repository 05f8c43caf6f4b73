"""The committed iterations of a journal as they hold now: what a restore has wound back is left out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

_WINDOW_BYTES: Final = 2**20


class Owner(msgspec.Struct, frozen=True):
    """The worker that was a rank of an iteration, as far as curves must know it."""

    node: str
    env_steps: int


class Line(msgspec.Struct, frozen=True):
    """A line of the journal, as far as curves must know it."""

    event: str
    generation: int
    unix_s: float
    iteration: int = 0
    restore: bool = False
    ranks: tuple[Owner, ...] = ()
    env_steps_total: int = 0
    wall_s: float = 0.0
    metrics: dict[str, float | None] = {}


class JournalTail:
    """Reads a journal that another one writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None

    def read(self) -> list[Line]:
        """The whole lines that were written since the last call (or `lineage`); at first the newest
        ones, since a journal may be far larger than what a supervisor may hold."""
        if self._offset is None:
            return self._lines(max(0, self._size() - _WINDOW_BYTES))
        return self._lines(self._offset)

    def lineage(self, since: int) -> dict[int, Line]:
        """Present iterations by number: all from ``since`` on, and maybe earlier ones. `read` goes on
        behind them."""
        size = self._size()
        window = _WINDOW_BYTES
        while True:
            begin = max(0, size - window)
            found = present(self._lines(begin))
            if begin == 0 or (found and min(found) <= since):
                return found
            window *= 4

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _lines(self, begin: int) -> list[Line]:
        """Whole lines from a byte on, the one that this cuts aside."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset = begin + len(data)
        return [line for raw in data.splitlines() if (line := _decode(raw)) is not None]


def present(lines: Iterable[Line]) -> dict[int, Line]:
    """What holds of these lines, by iteration."""
    found: dict[int, Line] = {}
    for line in lines:
        if line.event == "generation" and line.restore:
            found = {i: kept for i, kept in found.items() if i <= line.iteration}
        elif line.event == "iteration":
            found[line.iteration] = line
    return found


def _decode(raw: bytes) -> Line | None:
    """A line; None for what a killed supervisor left of one."""
    try:
        return msgspec.json.decode(raw, type=Line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
