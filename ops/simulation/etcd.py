"""A model of etcd: the keyspace that the embedded store also keeps, behind links that lose and delay
messages, and a cluster that may have no leader for a while."""

from __future__ import annotations  # else those of inner functions are evaluated at each call

import random
from bisect import bisect_right
from collections.abc import Callable
from typing import Final, TypeVar

from rallypoint.daemon.errors import LeaseExpiredError
from rallypoint.daemon.executors.keyspace import Keyspace
from rallypoint.daemon.executors.store import Put, WatchEvent
from rallypoint.ops.simulation import keys
from rallypoint.ops.simulation.clock import Clock
from rallypoint.ops.simulation.scenario import DETECT_S, Scenario

TRY_S: Final = DETECT_S / 3
"""A request without an answer by then counts as failed; it may still arrive."""
_EXPIRE_EVERY_S: Final = 0.2

T = TypeVar("T")


class Watched:
    """All changes of the keys that are watched together, in order."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []

    def since(self, revision: int) -> list[WatchEvent]:
        """Those after this revision."""
        first = bisect_right(self.events, revision, key=lambda event: event.mod_revision)
        return self.events[first:]


class Etcd:
    """``changed`` is told every change, at the moment it is made."""

    def __init__(
        self,
        clock: Clock,
        choose: random.Random,
        scenario: Scenario,
        changed: Callable[[tuple[WatchEvent, ...]], None],
    ) -> None:
        self.keys = Keyspace(history=100_000)
        self.public, self.members = Watched(), Watched()
        """What everybody watches, and what only the leader does."""
        self.serves = True
        """It has a leader and a majority."""
        self.cut: set[int] = set()
        """Nodes that cannot reach it."""
        self._clock = clock
        self._choose = choose
        self._scenario = scenario
        self._changed = changed
        self._told = 0
        clock.after(_EXPIRE_EVERY_S, self._expire)

    def request(
        self,
        node: int,
        ask: Callable[[Keyspace, float], T],
        answer: Callable[[T | LeaseExpiredError | None], None],
    ) -> None:
        """Carry a request of a node there and its answer back. ``answer`` gets the result, the error of
        a lost lease, or None when no answer came in time: then it may or may not have happened."""
        there_s, back_s = self._delay_s(), self._delay_s()
        lost = self._lost(node)
        state = {"open": True}

        def close(result: T | LeaseExpiredError | None) -> None:
            if state["open"]:
                state["open"] = False
                answer(result)

        def arrive() -> None:
            if lost or not self.reaches(node):
                return
            try:
                result: T | LeaseExpiredError = ask(self.keys, self._clock.now)
            except LeaseExpiredError as error:
                result = error
            self.tell()
            if not self._lost(node):
                self._clock.after(back_s, lambda: close(result) if self._linked(node) else None)

        self._clock.after(there_s, arrive)
        self._clock.after(TRY_S, lambda: close(None))

    def reaches(self, node: int) -> bool:
        """Whether requests of this node can be served now."""
        return self.serves and self._linked(node)

    def stop(self) -> None:
        """No leader, or no majority: nothing is served, and no lease runs out."""
        self.serves = False

    def start(self) -> None:
        """A leader is elected; it gives every lease its whole time again."""
        if not self.serves:
            self.serves = True
            self.keys.extend_leases(self._clock.now)

    def tell(self) -> None:
        """Hand on all changes since the last time."""
        if self.keys.revision > self._told:
            events = self.keys.changes("", self._told + 1)
            self._told = self.keys.revision
            for event in events:
                key = event.item.key if isinstance(event, Put) else event.key
                member = key.startswith(keys.MEMBERS)
                (self.members if member else self.public).events.append(event)
            self._changed(events)

    def _linked(self, node: int) -> bool:
        return node not in self.cut

    def _lost(self, node: int) -> bool:
        return self._scenario.loss > 0 and self._choose.random() < self._scenario.loss

    def _delay_s(self) -> float:
        return self._choose.uniform(0.0005, self._scenario.message_s)

    def _expire(self) -> None:
        if self.serves:
            self.keys.expire(self._clock.now)
            self.tell()
        self._clock.after(_EXPIRE_EVERY_S, self._expire)
