"""Copies of the committed state: the newest one, and those that a checkpoint's writer still reads.

A commit goes into a copy that nobody reads; so a checkpoint is taken by lending, not by copying, and
the training loop does not stand still for it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rallypoint.trainer.elastic.registry import PackedState


@dataclass(eq=False)
class _Copy:
    state: PackedState
    readers: int = 0


class SnapshotCopies:
    """One copy to begin with; another one whenever all are read. With writers that hold two each (one in
    flight, one waiting) there are never more than one and two for each writer."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live
        self._lock = threading.Lock()
        self._newest = _Copy(PackedState(live))
        self._spare: list[_Copy] = []
        self._count = 1

    @property
    def newest(self) -> PackedState:
        """The committed state; not to be written to."""
        return self._newest.state

    @property
    def size_bytes(self) -> int:
        """Of all copies together."""
        return self._count * self._newest.state.size_bytes

    def fill_from(self, live: Mapping[str, Tensor]) -> None:
        """Commit: the newest copy is of ``live`` now. Whoever reads an older one goes on reading it."""
        with self._lock:
            target = self._newest if self._newest.readers == 0 else self._take()
        target.state.fill_from(live)
        self._newest = target

    def lend(self) -> tuple[PackedState, Callable[[], None]]:
        """The newest copy, which does not change before what is returned beside it is called, once, by
        whichever thread."""
        with self._lock:
            copy = self._newest
            copy.readers += 1
        return copy.state, lambda: self._give_back(copy)

    def _take(self) -> _Copy:
        if self._spare:
            return self._spare.pop()
        self._count += 1
        return _Copy(PackedState(self._live))

    def _give_back(self, copy: _Copy) -> None:
        with self._lock:
            copy.readers -= 1
            if copy.readers == 0 and copy is not self._newest:
                self._spare.append(copy)
