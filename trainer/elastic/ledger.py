"""Where the wall time of this worker goes: always in exactly one activity."""

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rallypoint.daemon.shared.activity import BUCKETS, PRODUCTIVE, bucket_of, split
from rallypoint.daemon.shared.slotpage import SlotPage

_PHASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ready": "detect",
        "arrive": "group",
        "group_init": "group",
        "who_is_where": "sync",
        "broadcast": "sync",
        "hash_compare": "sync",
        "restore": "sync",
        "envs": "envs",
    }
)
"""Phases of the page -> phases of a recovery; the others change nothing."""
_INDEX: Final[Mapping[str, int]] = MappingProxyType({b: i for i, b in enumerate(BUCKETS)})


class Ledger:
    """Adds up seconds by bucket on the slot's page; `switch` names what comes next. The main thread
    switches; phases may change in the thread that forms a generation."""

    def __init__(self, page: SlotPage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._ns = dict.fromkeys(BUCKETS, 0)
        self._taken_ns = dict(self._ns)
        self._bucket, self._phase = "warm_up", "detect"
        self._since_ns = time.monotonic_ns()
        self._redone_ns = 0
        page.begin_ledger(_INDEX["warm_up"], self._since_ns)

    def switch(self, activity: str) -> None:
        """From now on time belongs to ``activity``. Raises KeyError for an unknown one."""
        with self._lock:
            self._book(bucket_of(activity, self._phase), None)

    def recover(self, phase: str, *, since_ns: int | None = None) -> None:
        """From now on, or from ``since_ns`` (CLOCK_MONOTONIC) where that is later than the last switch, time
        belongs to this phase of a recovery."""
        with self._lock:
            self._phase = phase
            self._book(bucket_of("recovery", phase), since_ns)

    def phase(self, name: str) -> None:
        """This worker is in a phase of the page; in a recovery its time belongs to it from now on."""
        with self._lock:
            self._phase = _PHASES.get(name, self._phase)
            activity, _ = split(self._bucket)
            self._book(bucket_of(activity, self._phase), None)

    def redo(self, *activities: str) -> None:
        """What these activities made since the last commit is thrown away."""
        with self._lock:
            self._book(self._bucket, None)
            self._redone_ns += sum(self._ns[name] - self._taken_ns[name] for name in activities)

    def so_far_s(self, activity: str) -> float:
        """Seconds of an activity since the last take; of the present one until it began."""
        return 1e-9 * (self._ns[activity] - self._taken_ns[activity])

    def take(self) -> tuple[dict[str, float], float]:
        """Seconds since the last take, by activity; and how many of them made what was thrown away."""
        with self._lock:
            self._book(self._bucket, None)
            seconds: dict[str, float] = {}
            for bucket, ns in self._ns.items():
                if ns > self._taken_ns[bucket]:
                    name, _ = split(bucket)
                    seconds[name] = seconds.get(name, 0.0) + 1e-9 * (ns - self._taken_ns[bucket])
            self._taken_ns = dict(self._ns)
            redone_ns, self._redone_ns = self._redone_ns, 0
            return seconds, min(
                1e-9 * redone_ns, sum(seconds.get(name, 0.0) for name in PRODUCTIVE)
            )

    def _book(self, following: str, since_ns: int | None) -> None:
        """Close the present bucket; ``following`` begins. The page has the seconds before the bucket: who
        reads in between finds the present one as old as nothing."""
        now_ns = time.monotonic_ns()
        end_ns = now_ns if since_ns is None else max(self._since_ns, min(since_ns, now_ns))
        index = _INDEX[following]
        self._ns[self._bucket] += end_ns - self._since_ns
        self._page.put_ledger(_INDEX[self._bucket], self._ns[self._bucket], index)
        self._bucket, self._since_ns = following, end_ns
