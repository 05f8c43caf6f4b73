"""Who is where: the decision that members of a new generation take from what each of them holds.

Pure functions. Every member sees the same records, so every member decides the same.

``prepared(k)``: the rank holds the result of the last packed collective of iteration k.
``committed(k)``: it has then left the one-integer barrier that follows. If anybody committed k, all
ranks of that generation were prepared, so nobody needs to repeat k; if somebody is not prepared,
nobody can have committed k, and all may roll back.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.trainer.errors import TrainerError


class Whereabouts(msgspec.Struct, frozen=True):
    """What one member brings along; it writes this when it arrives."""

    key: WorkerKey
    last_formed: int
    """Newest generation it has formed; 0 for a fresh process."""
    prepared: int
    committed: int
    in_hand: tuple[int, ...]
    """Env blocks whose rollout of iteration ``committed + 1`` it holds or is collecting."""
    checkpoint: tuple[int, int] | None
    """(generation, iteration) of the newest verified checkpoint it can read."""


@dataclass(frozen=True)
class Decision:
    """What a generation starts from."""

    mode: Literal["source", "apply_held", "roll_back", "restore", "fresh"]
    """source: somebody committed; apply_held: all survivors hold the same result; roll_back: redo;
    restore: the source reads a checkpoint; fresh: nothing exists yet."""
    source: int
    """Rank whose state the receivers take."""
    iteration: int
    """Newest committed iteration after this (of the checkpoint, for restore)."""
    survivors: frozenset[int]
    """Ranks whose state counts."""
    receivers: frozenset[int]
    """Ranks that take the source's state."""


def decide_source(plan: Plan, members: Sequence[Whereabouts]) -> Decision:
    """Decide from the records of all members, in rank order.

    Raises `TrainerError` when the plan says that survivors live but none is among the members, and
    when the job has progress but nobody reads a checkpoint.
    """
    lineage = [m.last_formed for m in members if m.last_formed and m.last_formed >= plan.formed]
    if not lineage:
        return _decide_restore(plan, members)
    newest = max(lineage)
    survivors = {r: m for r, m in enumerate(members) if m.last_formed == newest}
    iteration = max(max(m.prepared, m.committed) for m in survivors.values())
    committed = [r for r, m in survivors.items() if m.committed == iteration]
    mode: Literal["source", "apply_held", "roll_back"]
    if committed:
        mode, source = "source", min(committed)
        behind = {r for r, m in survivors.items() if max(m.committed, m.prepared) < iteration}
    elif all(m.prepared == iteration for m in survivors.values()):
        mode, source, behind = "apply_held", min(survivors), set()
    else:
        iteration -= 1
        mode, source = "roll_back", min(survivors)
        behind = {r for r, m in survivors.items() if m.committed != iteration}
    newcomers = set(range(len(members))) - set(survivors)
    return Decision(
        mode=mode,
        source=source,
        iteration=iteration,
        survivors=frozenset(survivors),
        receivers=frozenset(newcomers | behind),
    )


def _decide_restore(plan: Plan, members: Sequence[Whereabouts]) -> Decision:
    if not plan.restore:
        raise TrainerError(
            f"generation {plan.generation} was planned with survivors of generation {plan.formed} or "
            f"later, but its {len(members)} members last formed {[m.last_formed for m in members]}"
        )
    everybody = frozenset(range(len(members)))
    holders = [(m.checkpoint, -r) for r, m in enumerate(members) if m.checkpoint is not None]
    if not holders and plan.resumes:
        raise TrainerError(
            f"generation {plan.generation}: the job has progress, but none of its {len(members)} "
            "members can read a verified checkpoint; not starting from scratch: make the checkpoints "
            "readable again, or start a new job with --fresh"
        )
    if not holders:
        return Decision("fresh", 0, 0, frozenset(), everybody - {0})
    (_, iteration), negative_rank = max(holders)
    source = -negative_rank
    return Decision("restore", source, iteration, frozenset(), everybody - {source})


def contributions(
    plan: Plan, members: Sequence[Whereabouts], decision: Decision, *, recollect: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Env blocks that each rank puts into the first iteration of a generation, in rank order.

    A rollout of that iteration that a survivor has in hand is used as it is. Ranks that still have
    to collect take their planned blocks, less those that somebody else has in hand: no env enters an
    iteration twice. (What a rank held of an iteration that is now committed, or of a state that is
    given up, counts no more.) With ``recollect`` a survivor also collects the planned blocks that
    nobody has in hand: those of the lost.
    """
    in_hand = [
        m.in_hand
        if r in decision.survivors
        and r not in decision.receivers
        and m.committed == decision.iteration
        else ()
        for r, m in enumerate(members)
    ]
    held = {block for blocks in in_hand for block in blocks}
    free = [tuple(b for b in planned.blocks if b not in held) for planned in plan.members]
    return tuple(
        (*mine, *new) if recollect or not mine else mine
        for mine, new in zip(in_hand, free, strict=True)
    )


def majority(hashes: Sequence[int], voters: Collection[int]) -> tuple[int, frozenset[int]]:
    """(source, ranks that differ from it) among state hashes in rank order.

    ``voters`` are the survivors, or all ranks where there is none: a newcomer only echoes the state
    that it was sent. The source is the lowest voter whose hash is the commonest among voters; on a
    tie the hash of the lowest voter wins.
    """
    ranks = sorted(voters)
    counts = Counter(hashes[r] for r in ranks)
    most = max(counts.values())
    source = next(r for r in ranks if counts[hashes[r]] == most)
    return source, frozenset(r for r, value in enumerate(hashes) if value != hashes[source])
