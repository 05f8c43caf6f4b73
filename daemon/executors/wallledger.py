"""The goodput ledger of a node: every second of every slot, in exactly one activity, with its cause.

A worker accounts for its own time on its slot's page; the time before it does so, and that of a slot
without a worker, is timed here. Whatever is not progress is *badput*, and has a cause. All times are
monotonic seconds, passed in; what is counted never falls, and its sum is slots times time.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from rallypoint.daemon.shared.activity import BUCKETS, PRODUCTIVE, split
from rallypoint.daemon.shared.messages import Committed
from rallypoint.daemon.shared.plan import ChangeCause, WorkerKey
from rallypoint.daemon.shared.slotpage import LedgerReading

RESTART: Final = "recovery/restart"
QUARANTINE: Final = "idle/quarantine"
_ALL: Final = (*BUCKETS, RESTART, QUARANTINE)
_WARM_UP: Final = BUCKETS.index("warm_up")
_PRODUCTIVE: Final = tuple(BUCKETS.index(name) for name in PRODUCTIVE)
_CAUSES: Final = {
    "checkpoint": "checkpoint",
    "warm_up": "warm_up",
    "hold": "hold",
    "drain": "drain",
    "idle": "idle",
    RESTART: "restart",
    QUARANTINE: "quarantine",
}
"""Causes that follow from the bucket; that of a recovery is known once its generation has formed."""


class SlotBooks(msgspec.Struct):
    """What is accounted for of one slot."""

    since_s: float
    """When the life in it began, or up to when the empty slot is accounted for."""
    key: WorkerKey | None = None
    """The worker in it; None: it is empty."""
    empty: str = "warm_up"
    """Bucket of an empty slot's time."""
    counted: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(BUCKETS))
    """Seconds of this life that are counted, by bucket."""
    until_s: float = 0.0
    """Up to when this life is accounted for."""
    settled_s: float = 0.0
    """Seconds of this life in productive activities that it has reported with a commit."""


class WallBooks(msgspec.Struct, frozen=True):
    """What the next supervisor needs to go on."""

    slots: tuple[SlotBooks, ...]
    recovering_s: float
    """Seconds of recoveries whose cause is not known yet."""


class WallLedger:
    """Counts up; `take` hands over what has come since the last time."""

    def __init__(self, slots: int, now: float) -> None:
        self._slots = [SlotBooks(now) for _ in range(slots)]
        self._recovering_s = 0.0
        self._cause: ChangeCause | None = None
        """Of the recovery under way; None: it is not known yet."""
        self._wall: dict[str, float] = dict.fromkeys(_ALL, 0.0)
        self._badput: dict[str, float] = {}

    def books(self) -> WallBooks:
        """Everything that is not handed over with `take`."""
        return WallBooks(tuple(self._slots), self._recovering_s)

    def resume(self, books: WallBooks | None) -> None:
        """Go on where the supervisor before was killed, if it had as many slots and buckets."""
        if books is None or len(books.slots) != len(self._slots):
            return
        if all(len(slot.counted) == len(BUCKETS) for slot in books.slots):
            self._slots, self._recovering_s = list(books.slots), books.recovering_s

    def tick(self, now: float, pages: Mapping[WorkerKey, LedgerReading]) -> None:
        """Account for all slots up to ``now``. ``pages``: of all workers that are not reported gone."""
        for number, slot in enumerate(self._slots):
            new = next((k for k in pages if k.slot == number and k != slot.key), None)
            if new is not None and slot.key not in pages:
                if (
                    slot.key is not None
                ):  # it went while there was no supervisor, and nobody said so
                    slot = SlotBooks(slot.until_s, empty=RESTART)
                self._empty(slot, now)
                # What the page has from before it was noticed is that of the empty slot.
                slot = SlotBooks(now, new, counted=pages[new].seconds(now), until_s=now)
                self._slots[number] = slot
            if slot.key is None:
                self._empty(slot, now)
            elif slot.key in pages:
                self._life(slot, now, pages[slot.key])

    def ended(self, key: WorkerKey, now: float, page: LedgerReading, *, by_agreement: bool) -> None:
        """The worker's process is gone; ``page`` is the last reading."""
        slot = self._slots[key.slot]
        if slot.key != key:
            return
        self._life(slot, now, page)
        productive_s = sum(slot.counted[bucket] for bucket in _PRODUCTIVE)
        self._blame("redone", max(0.0, productive_s - slot.settled_s))
        self._slots[key.slot] = SlotBooks(now, empty="drain" if by_agreement else RESTART)

    def quarantined(self, slots: Iterable[bool]) -> None:
        """For each slot, whether it is in quarantine: then an empty one waits for nothing else."""
        for slot, held in zip(self._slots, slots, strict=True):
            if slot.key is None and held != (slot.empty == QUARANTINE):
                slot.empty = QUARANTINE if held else RESTART

    def committed(self, message: Committed) -> None:
        """A worker reports what it did since its last commit."""
        slot = self._slots[message.key.slot]
        if slot.key == message.key:
            slot.settled_s += sum(message.activity.get(name, 0.0) for name in PRODUCTIVE)
        self._blame("redone", message.redone_s)

    def changing(self) -> None:
        """A change of membership begins: its cause is known once its generation has formed."""
        self._cause = None

    def formed(self, cause: ChangeCause) -> None:
        """A generation has formed: what the slots lose to the recovery that it ends has this cause."""
        self._cause = cause
        self._blame(cause, self._recovering_s)
        self._recovering_s = 0.0

    def take(self) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
        """Since the last time: seconds by (activity, phase of a recovery or ""), and badput by cause."""
        wall = {split(bucket): seconds for bucket, seconds in self._wall.items() if seconds > 0.0}
        badput, self._badput = self._badput, {}
        self._wall = dict.fromkeys(_ALL, 0.0)
        return wall, badput

    def _empty(self, slot: SlotBooks, now: float) -> None:
        if slot.key is None:
            self._add(slot.empty, max(0.0, now - slot.since_s))
            slot.since_s = max(slot.since_s, now)

    def _life(self, slot: SlotBooks, now: float, page: LedgerReading) -> None:
        """Count what the page has, and what was before it began. A page may take seconds from one bucket
        and give them to another (a wait that turned out to be for nothing): what is counted does not fall, so
        the others are counted later; the sum is right at once."""
        begun_s = 1e-9 * page.began_ns if page.began_ns else now
        right = page.seconds(now)
        right[_WARM_UP] += max(0.0, min(begun_s, now) - slot.since_s)
        missing = [max(0.0, due - done) for due, done in zip(right, slot.counted, strict=True)]
        new = max(0.0, sum(right) - sum(slot.counted))
        slot.until_s = max(slot.until_s, now)
        share = new / sum(missing) if sum(missing) > 0.0 else 0.0
        for index, bucket in enumerate(BUCKETS):
            slot.counted[index] += share * missing[index]
            self._add(bucket, share * missing[index])

    def _add(self, bucket: str, seconds: float) -> None:
        self._wall[bucket] += seconds
        if bucket in _CAUSES:
            self._blame(_CAUSES[bucket], seconds)
        elif bucket.startswith("recovery/"):
            if self._cause is None:
                self._recovering_s += seconds
            else:
                self._blame(self._cause, seconds)

    def _blame(self, cause: str, seconds: float) -> None:
        if seconds > 0.0:
            self._badput[cause] = self._badput.get(cause, 0.0) + seconds
