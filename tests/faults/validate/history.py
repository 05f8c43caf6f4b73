"""Validation of what a run recorded, after the fact: a pure function over its books.

The journal is followed by the model; each worker's ledger is compared with the journal; the
counters are compared with both.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tests.faults.model.lineage import Shape, follow
from tests.faults.model.lines import (
    GenerationLine,
    IterationLine,
    JournalLine,
    Ledger,
    Life,
    Share,
)


@dataclass(frozen=True)
class Counters:
    """What /metrics said."""

    env_steps: float
    lost_died: float
    lost_dropped: float
    lost_cut: float
    mismatches: float


@dataclass(frozen=True)
class History:
    """The books of one run of one supervisor, while no change of membership is under way."""

    shape: Shape
    journal: tuple[JournalLine, ...]
    lines_before_counters: int
    """How much of the journal there was before the counters were read."""
    ledgers: Mapping[Life, Ledger]
    """Read after the counters, and before the journal."""
    live: frozenset[Life]
    counters: Counters
    seen: tuple[tuple[int, int], ...] = ()
    """(generation, iteration) as ``status`` showed them, one after the other."""


def violations(history: History) -> list[str]:
    """Everything that breaks a promise, in words; empty for a sound run."""
    _, wrong = follow(history.journal, history.shape)
    return [
        *wrong,
        *_sources(history),
        *_ledgers(history),
        *_shares(history),
        *_counters(history),
        *_seen(history),
    ]


def _sources(history: History) -> Iterator[str]:
    """The source of a generation is one of those that formed the newest one before it."""
    for line in history.journal:
        if not isinstance(line, GenerationLine) or line.restore:
            continue
        formed = {
            m.life: history.ledgers[m.life].formed_before(line.generation)
            for m in line.members
            if m.life in history.ledgers
        }
        source = formed.get(line.source.life, 0)
        if not source or source < max(formed.values()):
            yield f"generation {line.generation}: {line.source.life} is the source, not a survivor"


def _ledgers(history: History) -> Iterator[str]:
    """Each life by itself: whole epochs, nothing twice, nothing forgotten."""
    for life, ledger in history.ledgers.items():
        iterations = [commit.iteration for commit in ledger.commits]
        if any(b <= a for a, b in pairwise(iterations)):
            yield f"{life} committed iterations {iterations}"
        for commit in ledger.commits:
            if set(commit.entered.values()) - {history.shape.epochs}:
                yield (
                    f"{life}, iteration {commit.iteration}: trajectories entered "
                    f"{dict(Counter(commit.entered.values()))} mini-batches, "
                    f"not {history.shape.epochs} each"
                )
        uses = Counter(commit.digest for commit in ledger.commits if commit.entered)
        yield from (f"{life} committed rollout {d} {n} times" for d, n in uses.items() if n > 1)
        known = {rollout.digest for rollout in ledger.rollouts}
        yield from (f"{life} committed rollout {d}, never collected" for d in uses.keys() - known)
        finished = ledger.rollouts if life not in history.live else ledger.rollouts[:-1]
        unused = sum(r.env_steps for r in finished if r.digest not in uses)
        if life in history.live and unused > ledger.dropped_env_steps:
            yield (
                f"{life} did not use {unused} env steps of whole rollouts, and reported "
                f"{ledger.dropped_env_steps} dropped"
            )


def _shares(history: History) -> Iterator[str]:
    """What the journal says that a worker put in is what its ledger says, on every rank."""
    for life, ledger in history.ledgers.items():
        shares = _shares_of(life, history.journal)
        commits = {(c.generation, c.iteration): c for c in ledger.commits}
        newest = max((iteration for _, iteration in commits), default=0)
        for (generation, iteration), (line, share) in shares.items():
            where = f"{life}, iteration {iteration}"
            commit = commits.get((generation, iteration))
            if commit is None:
                # Its peers may have committed what it died before it could commit itself; and of a
                # live one the books were read first.
                if iteration <= newest or (life not in history.live and iteration > newest + 1):
                    yield f"{where}: in the journal, not in its ledger"
                continue
            size = history.shape.block
            ids = {b * size + i for b in share.blocks for i in range(size)}
            if set(commit.entered) != ids:
                yield f"{where}: the journal has envs {sorted(ids)}, its ledger {commit.entered}"
            if commit.state_hash != line.state_hash:
                yield f"{where}: state {commit.state_hash}, in the journal {line.state_hash}"
        last = max((i for _, i in shares), default=0)
        for generation, iteration in commits.keys() - shares.keys():
            if iteration <= last:
                yield f"{life} committed iteration {iteration} of generation {generation} alone"


def _shares_of(
    life: Life, journal: tuple[JournalLine, ...]
) -> dict[tuple[int, int], tuple[IterationLine, Share]]:
    return {
        (line.generation, line.iteration): (line, share)
        for line in journal
        if isinstance(line, IterationLine)
        for share in line.ranks
        if share.life == life
    }


def _counters(history: History) -> Iterator[str]:
    """Used steps are those of the journal; lost steps are what was collected and not used."""
    counters, shape = history.counters, history.shape
    early, _ = follow(history.journal[: history.lines_before_counters], shape)
    late, _ = follow(history.journal, shape)
    low, high = sum(early.used.values()), sum(late.used.values())
    if not low <= counters.env_steps <= high:
        yield f"env_steps_total is {counters.env_steps}, the journal has {low} to {high}"
    dead = {life: x for life, x in history.ledgers.items() if life not in history.live}
    died = sum(
        ledger.collected_env_steps - late.used.get(life, 0) - ledger.dropped_env_steps
        for life, ledger in dead.items()
    )
    dropped = sum(ledger.dropped_env_steps for ledger in history.ledgers.values())
    for reason, said, is_ in (
        ("died", counters.lost_died, died),
        ("dropped", counters.lost_dropped, dropped),
        ("cut", counters.lost_cut, 0),
    ):
        if said != is_:
            yield f"env_steps_lost_total{{{reason}}} is {said}, by the ledgers {is_}"
    if counters.mismatches:
        yield f"state_hash_mismatches_total is {counters.mismatches}"


def _seen(history: History) -> Iterator[str]:
    restores = any(isinstance(x, GenerationLine) and x.restore for x in history.journal[1:])
    for (g0, i0), (g1, i1) in pairwise(history.seen):
        if g1 < g0 or (i1 < i0 and not restores):
            yield f"status went back from generation {g0}, iteration {i0} to {g1}, {i1}"
