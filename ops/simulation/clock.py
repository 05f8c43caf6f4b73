"""Virtual time: a queue of what happens when."""

import heapq
from collections.abc import Callable


class Clock:
    """``now`` is virtual monotonic seconds; what is due at the same moment happens in the order in which
    it was asked for."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.happened = 0
        self._order = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Let ``act`` happen in ``delay_s`` seconds."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, act))

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due up to ``end_s``."""
        queue = self._queue
        while queue and queue[0][0] <= end_s:
            self.now, _, act = heapq.heappop(queue)
            self.happened += 1
            act()
        self.now = max(self.now, end_s)
