"""One seed from its start to its verdict, and many of them."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

from rallypoint.daemon.core.errors import InvalidTransition
from rallypoint.ops.simulation import mutants
from rallypoint.ops.simulation.cluster import Cluster
from rallypoint.ops.simulation.errors import Violation
from rallypoint.ops.simulation.faults import Faults
from rallypoint.ops.simulation.operating import Operator
from rallypoint.ops.simulation.scenario import FAULTS, draw

QUIET_S = 150.0
"""Once nothing goes wrong any more, the job must train within this time; to come to an end of its own it
may take as long again as its iterations do, since a restore may have begun with the first."""
_SLOWEST: Final = 1.2
"""So much longer than `Scenario.iteration_s` an iteration may take."""
TWICE_EVERY = 10
"""Every tenth seed is run a second time and must come to the very same end."""


@dataclass(frozen=True)
class Asked:
    """What is to be run."""

    nodes: int | None = None
    faults: tuple[str, ...] = FAULTS
    mutant: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a seed."""

    seed: int
    violation: str = ""
    """Name of the invariant that was broken; "" when all held."""
    message: str = ""
    steps: int = 0
    generations: int = 0
    iterations: int = 0
    nodes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    fingerprint: float = 0.0
    """Differs when anything differed on the way."""


def run(seed: int, asked: Asked, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed; every tenth twice."""
    outcome = _run(seed, asked, trace)
    if seed % TWICE_EVERY == 0 and trace is None:
        again = _run(seed, asked, None)
        if again != outcome:
            return Outcome(seed, "not_reproducible", f"{again} after {outcome}")
    return outcome


def run_many(seeds: Iterable[int], asked: Asked, processes: int) -> Iterator[Outcome]:
    """Run seeds in several processes; their outcomes in order."""
    if processes == 1:
        yield from (run(seed, asked) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        jobs = ((seed, asked) for seed in seeds)
        yield from pool.imap(_run_pair, jobs, chunksize=8)


def _run_pair(job: tuple[int, Asked]) -> Outcome:
    return run(*job)


def _run(seed: int, asked: Asked, trace: Callable[[str], None] | None) -> Outcome:
    scenario = draw(seed, asked.nodes, asked.faults)
    with nullcontext() if asked.mutant is None else mutants.applied(asked.mutant):
        cluster = Cluster(scenario, trace)
        faults = Faults(cluster)
        violation, message = "", ""
        try:
            _play(cluster, faults)
        except Violation as error:
            violation, message = error.name, str(error)
        except InvalidTransition as error:
            violation, message = "invalid_transition", str(error)
        except AssertionError as error:
            violation, message = "assertion", repr(error)
    return Outcome(
        seed=seed,
        violation=violation,
        message=message,
        steps=cluster.clock.happened,
        generations=len(cluster.checks.plans),
        iterations=cluster.checks.commits,
        nodes=len(cluster.nodes),
        faults=dict(Counter(faults.done)),
        fingerprint=cluster.choose.random() + cluster.clock.now,
    )


def _play(cluster: Cluster, faults: Faults) -> None:
    scenario, clock = cluster.scenario, cluster.clock
    cluster.start()
    if cluster.choose.random() < 0.7:
        clock.run_until(clock.now + 10.0)
    faults.begin()
    Operator(cluster, faults).begin()
    clock.run_until(clock.now + scenario.faulty_s)
    faults.mend()
    own_end = scenario.end in ("finished", "failed")
    training_s = scenario.end_iteration * scenario.iteration_s * _SLOWEST if own_end else 0.0
    end_s = clock.now + QUIET_S + training_s
    since = _Since(cluster)
    while clock.now < end_s:
        clock.run_until(clock.now + 1.0)
        if since.settled(faults):
            return
    raise Violation("liveness", since.why(faults))


class _Since:
    """Whether a cluster has come to rest: the plan is formed and holds everybody it should."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._generation = 0
        self._commits = 0

    def settled(self, faults: Faults) -> bool:
        """Whether the newest plan lists who it should, and iterations are committed in it."""
        cluster = self._cluster
        if self.over(faults):
            return True
        if self.why(faults) or cluster.newest_generation != self._generation:
            self._generation, self._commits = cluster.newest_generation, cluster.checks.commits
            return False
        plan = cluster.checks.plans[cluster.newest_generation]
        return plan.hold or cluster.checks.commits >= self._commits + 2

    def over(self, faults: Faults) -> bool:
        """Whether the job has ended, or was stopped on every node, and nothing of it is left."""
        cluster = self._cluster
        left = [n for n in cluster.nodes if n.index not in faults.gone]
        stopped = cluster.scenario.end == "stopped" and all(n.asked_to_stop for n in left)
        nothing = not any(n.up for n in cluster.nodes) and not cluster.living()
        return (cluster.checks.ended or stopped) and nothing

    def why(self, faults: Faults) -> str:
        """What is missing; "" when nothing is, but for time."""
        cluster, checks = self._cluster, self._cluster.checks
        if checks.ended:
            there = [n.name for n in cluster.nodes if n.up] or cluster.living()
            return f"the job has {checks.job.state}, but {there} are still there"
        plan = checks.plans.get(cluster.newest_generation)
        if plan is None:
            return "there is no plan"
        if checks.formed != plan.generation:
            return f"generation {plan.generation} is not marked formed, but {checks.formed}"
        scenario = cluster.scenario
        nodes = [n for n in cluster.nodes if n.index not in faults.gone]
        draining = {n.index for n in nodes if n.up and n.state.drain_cause}
        slots = sum(scenario.slots[n.index] for n in nodes if n.index not in draining)
        least = min(scenario.max_workers, max(slots - scenario.spares, scenario.min_workers, 1))
        if slots < scenario.min_workers:
            return ""  # a drained node that holds the only state: the job holds, as it must
        if scenario.end != "none":
            return f"the job has not {scenario.end}"
        if plan.world_size < min(least, slots):
            return f"{plan.world_size} workers train, of {slots} slots at least {least} should"
        return "" if not plan.hold else f"generation {plan.generation} holds"
