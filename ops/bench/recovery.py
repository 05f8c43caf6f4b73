"""``rallypoint bench recovery``: kill workers of a real job, and time the survivors.

The clock starts right before SIGKILL is sent and ends at the first optimiser step of the generation
that replaces the broken one, as each survivor reports it (one clock: CLOCK_MONOTONIC of this host).
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.ops.bench import sampling
from rallypoint.ops.bench.job import START_BOUND_S, Job
from rallypoint.ops.bench.processes import BenchError
from rallypoint.ops.bench.sampling import PageWatch

RECOVERY_BOUND_S: Final = 60.0
RETURN_BOUND_S: Final = 120.0
CALM_S: Final = (1.0, 3.0)
"""A kill comes at a random moment this long after the last change is over."""

PHASES: Final = ("detect", "plan", "release", "group", "sync", "envs", "first_step", "total")
"""In their order in time. detect: from the kill to the decision that takes it up. plan: to its
publication. release, group, sync, envs: as the slowest survivor reports them. first_step: from the
last survivor's formed generation to the first optimiser step. total: from the kill to the first
optimiser step of the last survivor."""


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it."""

    worker: str
    """``node/slot#incarnation``."""
    phase: str
    """Where the victim was."""
    recovered: bool
    """Every survivor made a step in a later generation."""
    generation: int | None
    seconds: Mapping[str, float | None]
    """By `PHASES`."""
    rollout_s: float | None
    """For how long survivors went on collecting meanwhile (the slowest)."""
    survivors_kept: bool
    """Every survivor is the process that it was."""
    back_s: float | None
    """From the kill to the first optimiser step of the replacement."""


@dataclass(frozen=True)
class Recovery:
    """All kills of one run."""

    kills: tuple[Kill, ...]
    step_s: float | None
    """Median time of an optimiser step while nothing was wrong."""
    hash_mismatches: int
    iterations: int
    entry_stalls_s: tuple[float, ...] = ()
    """Of each newcomer's entry, see `entry_stalls`."""
    error: str | None = None
    """Why the run ended before all kills were made."""


def measure(job: Job, kills: int, seed: int, on_kill: Callable[[Kill], None]) -> Recovery:
    """Make ``kills`` kills in a job that was just started, and call ``on_kill`` as each is over.
    Stops at the first kill that nobody recovers from."""
    rng = random.Random(seed)  # noqa: S311 - draws victims and moments, no secret
    done: list[Kill] = []
    steps: list[float] = []
    error = None
    job.wait_until_complete(START_BOUND_S)
    try:
        for _ in range(kills):
            steps += _watch_calm(job, rng.uniform(*CALM_S))
            kill = _kill_one(job, rng)
            done.append(kill)
            on_kill(kill)
            if not kill.recovered:
                error = f"no survivor's step within {RECOVERY_BOUND_S:g} s of kill {len(done)}"
                break
    except BenchError as failure:
        error = str(failure)
    job.journal.read()
    return Recovery(
        kills=tuple(done),
        step_s=median(steps) if steps else None,
        hash_mismatches=hash_mismatches(job),
        iterations=sum(line["event"] == "iteration" for line in job.journal.lines),
        entry_stalls_s=tuple(entry_stalls(job.journal.lines)),
        error=error,
    )


def _watch_calm(job: Job, seconds: float) -> list[float]:
    """Watch all workers for a while; seconds of one optimiser step, as often as it was seen."""
    watch = PageWatch(job.rundir, range(job.workers))
    end_s = time.monotonic() + seconds
    while (now := time.monotonic()) < end_s:
        watch.look(now)
        time.sleep(sampling.PERIOD_S)
    watch.close()
    return [s for samples in watch.samples.values() for s in sampling.step_seconds(samples)]


def _kill_one(job: Job, rng: random.Random) -> Kill:
    before = job.wait_until_complete(RETURN_BOUND_S)
    victim = rng.choice(before["workers"])
    survivors = [w for w in before["workers"] if w["slot"] != victim["slot"]]
    page = SlotPage(job.rundir.page(victim["slot"]))
    watch = PageWatch(job.rundir, [w["slot"] for w in survivors])
    watch.look(time.monotonic())
    phase = page.read().phase
    kill_s = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    line = _await_recovery(job, watch, before["generation"], kill_s)
    page.close()
    watch.close()
    name = f"{victim['node']}/{victim['slot']}#{victim['incarnation']}"
    if line is None:
        return Kill(name, phase, False, None, dict.fromkeys(PHASES), None, False, None)
    stepped = {w["slot"]: w["at_s"] for w in line["stepped"]}
    after = job.wait_until_complete(RETURN_BOUND_S)
    pids = {w["slot"]: w["pid"] for w in after["workers"]}
    return Kill(
        worker=name,
        phase=phase,
        recovered=True,
        generation=line["generation"],
        seconds=phase_seconds(line, kill_s),
        rollout_s=max(
            sampling.rollout_seconds(samples, kill_s, stepped.get(slot, kill_s))
            for slot, samples in watch.samples.items()
        ),
        survivors_kept=all(pids[w["slot"]] == w["pid"] for w in survivors),
        back_s=_back_s(job, victim["slot"], line["generation"], kill_s),
    )


def _await_recovery(
    job: Job, watch: PageWatch, generation: int, kill_s: float
) -> dict[str, Any] | None:
    """The journal's line about the generation that the survivors train in; None when there is none
    in time."""
    while time.monotonic() < kill_s + RECOVERY_BOUND_S:
        for _ in range(5):  # the file is read less often than the pages
            watch.look(time.monotonic())
            time.sleep(sampling.PERIOD_S)
        for line in job.journal.read():
            if line["event"] == "recovery" and line["generation"] > generation:
                return line
    return None


def phase_seconds(line: Mapping[str, Any], kill_s: float) -> dict[str, float | None]:
    """Seconds by `PHASES` of a ``recovery`` line of the journal, counted from the kill."""
    reported: Mapping[str, float | None] = line["seconds"]
    return {
        **{phase: reported[phase] for phase in PHASES},
        "detect": line["decided_s"] - kill_s,
        "plan": line["published_s"] - line["decided_s"],
        "total": max(worker["at_s"] for worker in line["stepped"]) - kill_s,
    }


def entry_stalls(lines: Sequence[Mapping[str, Any]], cause: str = "join") -> list[float]:
    """For how long each planned change of this cause held the others up in all, in seconds: from the last
    commit before it to the first commit after it, less the median iteration of the generation that it
    began (itself not counted; left out where nothing was committed on either side)."""
    joins = {n["generation"] for n in lines if n["event"] == "generation" and n["cause"] == cause}
    commits = [line for line in lines if line["event"] == "iteration"]
    gaps: dict[int, float] = {}
    usual: dict[int, list[float]] = {}
    for before, after in itertools.pairwise(commits):
        gap_s = after["unix_s"] - before["unix_s"]
        if before["generation"] == after["generation"]:
            usual.setdefault(after["generation"], []).append(gap_s)
        else:
            gaps[after["generation"]] = gap_s
    return [gaps[g] - median(usual[g]) for g in sorted(joins) if g in gaps and g in usual]


def _back_s(job: Job, slot: int, generation: int, kill_s: float) -> float | None:
    """When the slot's next worker made its first step."""
    job.journal.read()
    found = [
        worker["at_s"] - kill_s
        for line in job.journal.lines
        if line["event"] == "recovery" and line["generation"] > generation
        for worker in line["stepped"]
        if worker["slot"] == slot
    ]
    return min(found, default=None)


def hash_mismatches(job: Job) -> int:
    """State hashes that differed, as the supervisor logged them."""
    text = job.log.read_text(errors="replace") if job.log.exists() else ""
    names = ("state_hash_mismatch", "state_hash_conflict")
    return sum(text.count(f'"event": "{name}"') for name in names)
