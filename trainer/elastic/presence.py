"""What a worker shows of itself on its slot's page: where it is, and for whom it waits.

The supervisor tells a hang from a wait by this page alone. So whoever waits for the other members says
so (`waiting`, `collective`), whoever gets on touches the page, and whoever waits for something outside
of the job (storage, the supervisor) keeps touching it (`alive`).
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from rallypoint.daemon.shared.slotpage import PHASES, SlotPage

BEAT_S: Final = 0.5
"""How often a wait for storage touches the page."""


class Presence:
    """Writes the page; the main thread and the forming thread use it, one of them at a time."""

    def __init__(self, page: SlotPage) -> None:
        self._page = page
        self.waited_since_ns = 0
        """When the newest wait for the other members began (CLOCK_MONOTONIC), over or not."""

    def phase(self, name: str) -> None:
        """Enter a phase of `PHASES`."""
        self._page.put(phase=PHASES.index(name), touched_ns=time.monotonic_ns())

    def touch(self) -> None:
        """This worker gets on."""
        self._page.put(touched_ns=time.monotonic_ns())

    def join(self, generation: int) -> None:
        """This worker begins to form a generation; its collectives are counted from 0."""
        self._page.put(generation=generation, collective=0, touched_ns=time.monotonic_ns())

    def built(self, builds: int) -> None:
        """The simulator was built so often in this process."""
        self._page.put(env_builds=builds)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside: this worker waits for the other members of its generation."""
        self.waited_since_ns = time.monotonic_ns()
        self._page.put(inside=1, touched_ns=self.waited_since_ns)
        try:
            yield
        finally:
            self._page.put(inside=0, touched_ns=time.monotonic_ns())

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Inside the next collective; all members count the same ones."""
        self._page.add("collective", 1)
        with self.waiting():
            yield

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """This worker waits for storage, which takes as long as it takes: touched from a thread, so
        that only a process that is stopped, or holds its interpreter, falls silent."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_S):
                self.touch()

        thread = threading.Thread(target=beat, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.touch()
