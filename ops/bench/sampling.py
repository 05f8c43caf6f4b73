"""Watching workers from outside: their counter pages, read every two milliseconds, and what follows.

The pages tell what the journal does not: how long an optimiser step takes, and for how long a survivor
went on with its rollout while the group was rebuilt.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage

PERIOD_S: Final = 0.002


@dataclass(frozen=True)
class Sample:
    """The counters of one worker when one of them was first seen with its value."""

    at_s: float
    """CLOCK_MONOTONIC."""
    env_steps: int
    """Collected by this worker so far."""
    optimiser_steps: int


class PageWatch:
    """The pages of some slots."""

    def __init__(self, rundir: RunDir, slots: Sequence[int]) -> None:
        self._pages = {slot: SlotPage(rundir.page(slot)) for slot in slots}
        self.samples: dict[int, list[Sample]] = {slot: [] for slot in slots}
        """By slot, oldest first; a reading that changes nothing is left out."""

    def look(self, now: float) -> None:
        """Read every page at monotonic time ``now``."""
        for slot, page in self._pages.items():
            counters = page.read()
            seen = self.samples[slot]
            values = counters.collected_env_steps, counters.optimiser_steps
            if not seen or (seen[-1].env_steps, seen[-1].optimiser_steps) != values:
                seen.append(Sample(now, *values))

    def close(self) -> None:
        for page in self._pages.values():
            page.close()


def step_seconds(samples: Sequence[Sample]) -> list[float]:
    """Seconds of one optimiser step, the mean of each update that was seen: env steps do not change
    during one. Updates of which fewer than two steps were seen are left out."""
    found: list[float] = []
    for _, group in itertools.groupby(samples, key=lambda sample: sample.env_steps):
        steps = list(group)[1:]  # the first is the end of the rollout, or wherever the watch began
        if len(steps) > 1:
            count = steps[-1].optimiser_steps - steps[0].optimiser_steps
            found.append((steps[-1].at_s - steps[0].at_s) / count)
    return found


def rollout_seconds(samples: Sequence[Sample], begin_s: float, end_s: float) -> float:
    """For how long a worker collected between two moments: from its first env step in between (less
    the time of one) to its last."""
    changes = [
        after.at_s
        for before, after in itertools.pairwise(samples)
        if after.env_steps != before.env_steps and begin_s < after.at_s <= end_s
    ]
    if len(changes) < 2:
        return 0.0
    one_s = median(b - a for a, b in itertools.pairwise(changes))
    return changes[-1] - max(begin_s, changes[0] - one_s)
