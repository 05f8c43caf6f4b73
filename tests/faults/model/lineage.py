"""The model of a run: what may follow what in a journal, as one pure step per line.

It is written from the protocol's promises alone and knows nothing of how they are kept.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tests.faults.model.lines import (
    GenerationLine,
    IterationLine,
    JournalLine,
    Life,
    RecoveryLine,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the job."""

    block: int
    rollout_steps: int
    epochs: int


@dataclass(frozen=True)
class Lineage:
    """Where a run is after some lines of its journal."""

    generation: int = 0
    members: tuple[Life, ...] = ()
    iteration: int = 0
    hashes: MappingProxyType[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the state after each iteration of the present lineage."""
    env_steps: int | None = 0
    """Of the state; None after a restore, until an iteration shows it."""
    used: MappingProxyType[Life, int] = field(default_factory=lambda: MappingProxyType({}))
    """Env steps that entered a committed iteration, by worker."""


Step = tuple[Lineage, tuple[str, ...]]


def follow(lines: Iterable[JournalLine], shape: Shape) -> Step:
    """The lineage at the end, and everything that must not be."""
    lineage = Lineage()
    wrong: list[str] = []
    for line in lines:
        lineage, found = step(lineage, line, shape)
        wrong += found
    return lineage, tuple(wrong)


def step(before: Lineage, line: JournalLine, shape: Shape) -> Step:
    """What one line makes of a lineage, and which promises it breaks."""
    match line:
        case GenerationLine():
            return _generation(before, line)
        case IterationLine():
            return _iteration(before, line, shape)
        case RecoveryLine():
            return before, ()


def _generation(before: Lineage, line: GenerationLine) -> Step:
    name = f"generation {line.generation}"
    wrong = []
    if line.generation <= before.generation:
        wrong.append(f"{name} follows generation {before.generation}")
    if not line.restore and line.iteration != before.iteration:
        wrong.append(
            f"{name} starts from iteration {line.iteration}, but {before.iteration} is committed"
        )
    members = tuple(member.life for member in line.members)
    if line.source.life not in members:
        wrong.append(f"{name} takes its state from {line.source.life}, no member")
    after = replace(before, generation=line.generation, members=members, iteration=line.iteration)
    if line.restore and before.generation:
        if line.state_hash != before.hashes.get(line.iteration, line.state_hash):
            wrong.append(f"{name} restores iteration {line.iteration}, but other state")
        kept = {i: h for i, h in before.hashes.items() if i <= line.iteration}
        after = replace(after, env_steps=None, hashes=MappingProxyType(kept))
    return after, tuple(wrong)


def _iteration(before: Lineage, line: IterationLine, shape: Shape) -> Step:
    name = f"iteration {line.iteration}"
    wrong = []
    if line.iteration != before.iteration + 1:
        wrong.append(f"{name} follows iteration {before.iteration}")
    if line.generation != before.generation:
        wrong.append(f"{name} is of generation {line.generation} during {before.generation}")
    ranks = tuple(rank.life for rank in line.ranks)
    if ranks != before.members:
        wrong.append(f"{name} has ranks {ranks}, its generation {before.members}")
    if line.state_hash == before.hashes.get(before.iteration):
        wrong.append(f"{name} changed nothing")
    if not math.isfinite(line.metrics.get("policy_loss", math.nan)):
        wrong.append(f"{name} has no policy loss")
    blocks = [block for rank in line.ranks for block in rank.blocks]
    if len(set(blocks)) < len(blocks):
        wrong.append(f"{name} uses an env block twice: {blocks}")
    used = dict(before.used)
    for rank in line.ranks:
        whole = len(rank.blocks) * shape.block * shape.rollout_steps
        if rank.env_steps != whole:
            wrong.append(f"{name}: {rank.life} brought {rank.env_steps} env steps, not {whole}")
        used[rank.life] = used.get(rank.life, 0) + rank.env_steps
    brought = sum(rank.env_steps for rank in line.ranks)
    if before.env_steps is not None and line.env_steps_total != before.env_steps + brought:
        wrong.append(
            f"{name} counts {line.env_steps_total} env steps after {before.env_steps} and {brought}"
        )
    after = replace(
        before,
        iteration=line.iteration,
        hashes=MappingProxyType({**before.hashes, line.iteration: line.state_hash}),
        env_steps=line.env_steps_total,
        used=MappingProxyType(used),
    )
    return after, tuple(wrong)
