"""A page of counters per slot that survives the SIGKILL of the worker that writes it.

The worker maps ``DIR/slots/<slot>.page`` and stores plain 64-bit integers; the supervisor reads them,
also after the worker has died. Stores of aligned 8-byte words are not torn on the platforms we run on.
Each life of a worker starts with a cleared page.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from rallypoint.daemon.shared.activity import BUCKETS

PHASES: Final = (
    "starting",
    "warming",
    "ready",
    "arrive",
    "group_init",
    "who_is_where",
    "broadcast",
    "hash_compare",
    "wrap",
    "rollout",
    "statistics",
    "update",
    "last_collective",
    "barrier",
    "wait_formed",
    "commit",
    "checkpoint",
    "envs",
    "holding",
    "leaving",
    "restore",
)
_FIELDS: Final = (
    "incarnation",
    "generation",  # newest that this worker has begun to form
    "iteration",  # newest committed
    "phase",  # index into PHASES
    "collective",  # sequence number of the collective entered last, within the generation
    "inside",  # 1 while it waits for the other members, in that collective or to form
    "collected_env_steps",  # by this incarnation, since it started
    "optimiser_steps",
    "env_builds",
    "touched_ns",  # CLOCK_MONOTONIC of the last sign of getting on
    "ledger_bucket",  # index into BUCKETS of what its time belongs to now
    "ledger_began_ns",  # CLOCK_MONOTONIC from which on it is accounted for; 0: not yet
    *(f"{bucket}_ns" for bucket in BUCKETS),  # accounted for so far, but for the present stretch
)
_SIZE = 8 * len(_FIELDS)
_OFFSET = {name: 8 * i for i, name in enumerate(_FIELDS)}
_LEDGER_OFFSET = _OFFSET[f"{BUCKETS[0]}_ns"]


class SlotCounters(msgspec.Struct, frozen=True):
    """A reading of a page."""

    incarnation: int
    generation: int
    iteration: int
    phase: str
    collective: int
    inside: bool
    collected_env_steps: int
    optimiser_steps: int
    env_builds: int
    touched_ns: int


class LedgerReading(msgspec.Struct, frozen=True):
    """Where the time of one life went, as its page has it."""

    began_ns: int
    """CLOCK_MONOTONIC; 0: it has accounted for nothing yet."""
    bucket: int
    """Index into `BUCKETS` of the present one."""
    ns: tuple[int, ...]
    """Nanoseconds by bucket, without the present stretch."""

    def seconds(self, now: float) -> list[float]:
        """Seconds by bucket up to ``now`` (CLOCK_MONOTONIC), the present stretch included: together what
        has passed since it began, in whatever moment of a change it was read. All 0 before that."""
        seconds = [1e-9 * ns for ns in self.ns]
        if self.began_ns and self.bucket < len(seconds):
            seconds[self.bucket] += max(0.0, now - 1e-9 * (self.began_ns + sum(self.ns)))
        return seconds


class SlotPage:
    """Write side (worker) and read side (supervisor) of one page."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not a cut one: whoever still maps the page of the life before keeps it.
            path.unlink(missing_ok=True)
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            if path.stat().st_size < _SIZE:
                os.ftruncate(
                    file.fileno(), _SIZE
                )  # of a worker of an older version, which has less
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def put(self, **values: int) -> None:
        """Store the named counters. `phase` is an index into `PHASES`."""
        for name, value in values.items():
            struct.pack_into("<q", self._map, _OFFSET[name], value)

    def add(self, name: str, amount: int) -> None:
        offset = _OFFSET[name]
        (old,) = struct.unpack_from("<q", self._map, offset)
        struct.pack_into("<q", self._map, offset, old + amount)

    def read(self) -> SlotCounters:
        """A reading; torn between counters, never within one."""
        words = struct.unpack(f"<{len(_FIELDS)}q", self._map[:_SIZE])
        return _counters(dict(zip(_FIELDS, words, strict=True)))

    def begin_ledger(self, bucket: int, now_ns: int) -> None:
        """Account for this life from now on (CLOCK_MONOTONIC), in this bucket."""
        self.put(ledger_bucket=bucket)
        self.put(ledger_began_ns=now_ns)

    def put_ledger(self, bucket: int, ns: int, following: int) -> None:
        """A stretch of one bucket is over, ``ns`` with all before it; that of another begins. In this order:
        who reads in between finds the old one going on, and a sum that is right."""
        struct.pack_into("<q", self._map, _LEDGER_OFFSET + 8 * bucket, ns)
        self.put(ledger_bucket=following)

    def read_ledger(self) -> LedgerReading:
        """A reading, right in its sum whenever it is made."""
        words = struct.unpack_from(f"<{2 + len(BUCKETS)}q", self._map, _OFFSET["ledger_bucket"])
        return LedgerReading(words[1], words[0], words[2:])

    def close(self) -> None:
        self._map.close()


def _counters(values: dict[str, int]) -> SlotCounters:
    index = values["phase"]
    return SlotCounters(
        incarnation=values["incarnation"],
        generation=values["generation"],
        iteration=values["iteration"],
        phase=PHASES[index] if 0 <= index < len(PHASES) else f"phase-{index}",
        collective=values["collective"],
        inside=bool(values["inside"]),
        collected_env_steps=values["collected_env_steps"],
        optimiser_steps=values["optimiser_steps"],
        env_builds=values["env_builds"],
        touched_ns=values["touched_ns"],
    )
