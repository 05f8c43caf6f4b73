"""What a process holds (descriptors, threads, memory), and whether that grows."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Literal

Measure = Literal["fds", "threads", "rss_bytes"]
MEASURES: Final[tuple[Measure, ...]] = ("fds", "threads", "rss_bytes")
LEAST_SAMPLES: Final = 15
"""With fewer nothing is said about growth."""
_WINDOW: Final = 5
"""A window is this part of the samples: the early one is the second of them, after warm-up."""
_SLACK: Final[Mapping[Measure, float]] = {"fds": 2, "threads": 1, "rss_bytes": 4 * 2**20}
_SHARE: Final[Mapping[Measure, float]] = {"fds": 0.0, "threads": 0.0, "rss_bytes": 0.05}


@dataclass(frozen=True)
class Usage:
    """What one process held at one moment."""

    fds: int
    threads: int
    rss_bytes: int


@dataclass(frozen=True)
class Growth:
    """One measure of one process: median of an early window, and of the last one."""

    early: float
    late: float
    allowed: float
    """What ``late`` may be: noise of the allocator, a socket that is just being closed."""

    @property
    def grows(self) -> bool:
        return self.late > self.allowed


def usage(pid: int) -> Usage | None:
    """Of a process of ours; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None  # a zombie
    return Usage(fds, int(fields["Threads"]), int(fields["VmRSS"].split()[0]) * 1024)


def growth(samples: Sequence[Usage]) -> dict[Measure, Growth] | None:
    """Of samples in their order in time; None when they are too few to tell."""
    if len(samples) < LEAST_SAMPLES:
        return None
    size = len(samples) // _WINDOW
    found: dict[Measure, Growth] = {}
    for name in MEASURES:
        values = [float(getattr(sample, name)) for sample in samples]
        early, late = median(values[size : 2 * size]), median(values[-size:])
        found[name] = Growth(early, late, early + max(_SLACK[name], _SHARE[name] * early))
    return found
