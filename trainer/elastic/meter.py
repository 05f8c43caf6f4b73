"""What collectives cost this worker: calls, bytes and seconds of each."""

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from rallypoint.daemon.shared.collectives import NAMES, Use


class Meter:
    """Adds up; a process is in one collective at a time, in whatever thread."""

    def __init__(self) -> None:
        self._uses = dict.fromkeys(NAMES, Use(0, 0, 0.0))

    @contextlib.contextmanager
    def collective(self, name: str, value: Tensor) -> Iterator[None]:
        """Around a collective that this worker puts ``value`` into; one that raises is not counted.
        Raises KeyError for a name that is not in the registry. On a GPU its time is the host's."""
        before = self._uses[name]
        began_s = time.monotonic()
        yield
        seconds = before.seconds + time.monotonic() - began_s
        self._uses[name] = Use(before.calls + 1, before.size_bytes + value.nbytes, seconds)

    def take(self) -> dict[str, Use]:
        """What has been used since the last take, by name."""
        taken = {name: use for name, use in self._uses.items() if use.calls}
        self._uses = dict.fromkeys(NAMES, Use(0, 0, 0.0))
        return taken
