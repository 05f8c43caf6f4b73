"""``rallypoint bench soak``: many kills in one run of one job, and everything that must hold after each.

Victims are workers, sometimes two at once, and the supervisor, which is started again on the same
directory, as a service manager would. Nothing else is done to help the job. Half of the kills come once
all slots train again, half at any moment after the survivors do: also into a rebuild or a warm-up.

In each half of the run one worker, not the same, is spared, and in the first half the supervisor is:
survivors that are old enough to show what grows.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from rallypoint.ops.bench.job import START_BOUND_S, Job
from rallypoint.ops.bench.processes import BenchError
from rallypoint.ops.bench.recovery import RETURN_BOUND_S, hash_mismatches
from rallypoint.ops.bench.resources import MEASURES, Usage, growth, usage

Kind = Literal["one worker", "two workers", "supervisor", "supervisor and worker"]
KINDS: Final[tuple[Kind, ...]] = (
    "one worker",
    "two workers",
    "supervisor",
    "supervisor and worker",
)
GO_ON_BOUND_S: Final = 60.0
ITERATIONS_AFTER: Final = 5
"""So many more must be committed before the next kill."""
CALM_S: Final = 2.0
"""A kill comes at a random moment within this time after the wait for the one before."""


@dataclass(frozen=True)
class Blow:
    """One kill, or several at once."""

    kind: Kind
    victims: tuple[str, ...]
    """``node/slot#incarnation (state)``, or ``supervisor``."""
    still_s: float | None
    """Longest time between two committed iterations from the kill on (for the supervisor: between
    their lines in the journal, which nobody writes meanwhile); None: training did not go on."""


@dataclass
class Soak:
    """What was seen in one run."""

    blows: list[Blow] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    samples: dict[str, list[Usage]] = field(default_factory=dict)
    """By process and half of the run, taken while all slots train."""
    iterations: int = 0
    generations: int = 0
    hash_mismatches: int = 0


@dataclass
class Lineage:
    """Follows the journal: each iteration once and in order, from one state that is never lost."""

    generation: int = 0
    iteration: int = 0

    def follow(self, lines: Iterable[Mapping[str, Any]]) -> list[str]:
        """What is wrong with lines that are new."""
        wrong = []
        for line in lines:
            generation = line["generation"]
            if line["event"] == "iteration":
                if line["iteration"] != self.iteration + 1:
                    wrong.append(f"iteration {line['iteration']} follows {self.iteration}")
                self.iteration = line["iteration"]
            elif line["event"] == "generation":
                if generation <= self.generation:
                    wrong.append(f"generation {generation} follows {self.generation}")
                if line["restore"] and self.generation:
                    wrong.append(f"generation {generation} restored, though a survivor lived")
                self.generation = generation
        return wrong


def draw_kinds(kills: int, workers: int, rng: random.Random) -> list[Kind]:
    """A fifth of each half are two workers at once; in the second half a quarter are the supervisor,
    every other time with a worker; each kind that can come does."""
    half = kills // 2
    first, second = (
        _kinds(half, workers, 0),
        _kinds(kills - half, workers, (kills - half) // 4 or 1),
    )
    rng.shuffle(first)
    rng.shuffle(second)
    return [*first, *second]


def _kinds(count: int, workers: int, supervisors: int) -> list[Kind]:
    two = (count // 5 or 1) if workers > 2 else 0
    kinds: list[Kind] = ["two workers"] * two
    kinds += [KINDS[2 + n % 2] for n in range(supervisors)]
    kinds += ["one worker"] * count
    return kinds[:count]


def measure(job: Job, kills: int, seed: int, on_blow: Callable[[Blow], None]) -> Soak:
    """Deal ``kills`` blows to a job that was just started, and call ``on_blow`` as each is over. Ends
    early when training does not go on."""
    run = _Run(job, random.Random(seed))  # noqa: S311 - draws victims and moments, no secret
    kinds = draw_kinds(kills, job.workers, run.rng)
    try:
        job.wait_until_complete(START_BOUND_S)
        for number, kind in enumerate(kinds):
            run.half = 0 if number < kills // 2 else 1
            on_blow(run.deal(kind))
        run.sample(job.wait_until_complete(RETURN_BOUND_S))
    except BenchError as error:
        run.soak.violations.append(str(error))
    return run.finish()


class _Run:
    """A run under way."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.rng = rng
        self.half = 0
        self.soak = Soak()
        self._job = job
        self._lineage = Lineage()
        self._spared = rng.sample(range(job.workers), 2)

    def deal(self, kind: Kind) -> Blow:
        """One kill of this kind, and the wait until training has gone on. Raises `BenchError` when it
        does not."""
        if self.rng.random() < 0.5:
            self.sample(self._job.wait_until_complete(RETURN_BOUND_S))
        time.sleep(self.rng.uniform(0.0, CALM_S))
        count = {"one worker": 1, "two workers": 2, "supervisor": 0}.get(kind, 1)
        before = self._job.wait_for(
            f"{count} workers to kill", lambda s: len(self._targets(s)) >= count, RETURN_BOUND_S
        )
        victims = self.rng.sample(self._targets(before), count)
        self._read_journal()
        known = len(self._job.journal.lines)
        for victim in victims:
            os.kill(victim["pid"], signal.SIGKILL)
        if kind.startswith("supervisor"):
            self._job.kill_and_start_again()
        names = tuple(_name(victim) for victim in victims)
        blow = Blow(kind, ("supervisor", *names) if kind.startswith("supervisor") else names, None)
        self.soak.blows.append(blow)
        after = self._job.wait_for(
            f"training after kill {len(self.soak.blows)} ({', '.join(blow.victims)})",
            lambda s: (s["iteration"] or 0) >= before["iteration"] + ITERATIONS_AFTER,
            GO_ON_BOUND_S,
        )
        self._read_journal()
        self._compare_survivors(before, victims, after)
        self.soak.blows[-1] = blow = Blow(kind, blow.victims, self._still_s(known))
        return blow

    def sample(self, status: Mapping[str, Any]) -> None:
        """What the supervisor and the spared worker hold, while all slots train."""
        slot = self._spared[self.half]
        worker = status["workers"][slot]
        half = ("first half", "second half")[self.half]
        for name, pid in (("supervisor", self._job.pid), (f"worker {slot}", worker["pid"])):
            held = usage(pid)
            if held is not None:
                self.soak.samples.setdefault(f"{name}, {half}", []).append(held)

    def finish(self) -> Soak:
        """What was seen, with the verdict on growth."""
        soak = self.soak
        self._read_journal()
        soak.iterations, soak.generations = self._lineage.iteration, self._lineage.generation
        soak.hash_mismatches = hash_mismatches(self._job)
        if soak.hash_mismatches:
            soak.violations.append(f"{soak.hash_mismatches} hash mismatches")
        for name, samples in soak.samples.items():
            found = growth(samples) or {}
            soak.violations += [
                f"{name}: {measure} grew from {found[measure].early:g} to {found[measure].late:g}"
                for measure in MEASURES
                if found and found[measure].grows
            ]
        return soak

    def _targets(self, status: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Workers that have a process, without the one that is spared."""
        return [
            w
            for w in status["workers"]
            if w["pid"] is not None and w["slot"] != self._spared[self.half]
        ]

    def _compare_survivors(
        self,
        before: Mapping[str, Any],
        victims: list[dict[str, Any]],
        after: Mapping[str, Any],
    ) -> None:
        for worker in before["workers"]:
            now = after["workers"][worker["slot"]]
            if worker["state"] != "training" or worker in victims or now["pid"] == worker["pid"]:
                continue
            number = len(self.soak.blows)
            self.soak.violations.append(f"kill {number} also cost {_name(worker)} its process")

    def _still_s(self, known: int) -> float:
        """The longest time between two iterations that the journal has got since it had this many
        lines, counted from the last one before."""
        lines = self._job.journal.lines
        before = [x["unix_s"] for x in lines[:known] if x["event"] == "iteration"][-1:]
        times = [*before, *(x["unix_s"] for x in lines[known:] if x["event"] == "iteration")]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def _read_journal(self) -> None:
        self.soak.violations += self._lineage.follow(self._job.journal.read())


def _name(worker: Mapping[str, Any]) -> str:
    return f"{worker['node']}/{worker['slot']}#{worker['incarnation']} ({worker['state']})"
