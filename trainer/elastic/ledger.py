"""Where the wall time of this worker goes: always in exactly one activity."""

import time
from typing import Final

ACTIVITIES: Final = (
    "rollout",
    "update",
    "statistics",
    "recovery",
    "checkpoint",
    "warm_up",
    "hold",
    "drain",
    "idle",
)


class Ledger:
    """Adds up seconds by activity; `switch` names what comes next. One thread uses it."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._now = "warm_up"
        self._since_s = time.monotonic()

    def switch(self, activity: str) -> None:
        """From now on time belongs to ``activity``. Raises KeyError for an unknown one."""
        now_s = time.monotonic()
        self._seconds[self._now] += now_s - self._since_s
        self._seconds[activity] += 0.0
        self._now, self._since_s = activity, now_s

    def so_far_s(self, activity: str) -> float:
        """Seconds of an activity since the last take; of the present one until it began."""
        return self._seconds[activity]

    def take(self) -> dict[str, float]:
        """Seconds since the last take, by activity."""
        self.switch(self._now)
        taken = {name: seconds for name, seconds in self._seconds.items() if seconds}
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        return taken
