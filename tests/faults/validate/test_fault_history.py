"""The validator accepts a sound history and names what is wrong with each broken one."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from tests.faults.model.lineage import Shape
from tests.faults.model.lines import (
    Collected,
    Committed,
    Formed,
    GenerationLine,
    IterationLine,
    JournalLine,
    Ledger,
    LedgerLine,
    Life,
    Lost,
    Member,
    Share,
)
from tests.faults.validate.history import Counters, History, violations

A, B, C, B2 = Life(0, 1), Life(1, 1), Life(2, 1), Life(1, 2)
SHAPE = Shape(block=2, rollout_steps=4, epochs=3)
STEPS = 8
A2, C2 = Life(0, 2), Life(2, 2)
BLOCK = {A: 0, B: 1, C: 2, A2: 0, B2: 1, C2: 2}
Change = Callable[[History], History]


def generation(number: int, iteration: int, *lives: Life, restore: bool = False) -> GenerationLine:
    members = tuple(Member(*life) for life in lives)
    hash_ = f"h{iteration}"
    return GenerationLine(number, "forced", restore, iteration, members, members[0], hash_)


def iteration(number: int, of: int, before: int, *lives: Life) -> IterationLine:
    ranks = tuple(Share(*life, (BLOCK[life],), STEPS) for life in lives)
    total = before + STEPS * len(lives)
    return IterationLine(of, number, ranks, f"h{number}", total, {"policy_loss": 0.1 * number})


def books(life: Life, *entries: LedgerLine | tuple[int, int], lost_steps: int = 0) -> Ledger:
    """``(generation, iteration)`` is a rollout collected and committed."""
    lines: list[LedgerLine] = []
    for entry in entries:
        if isinstance(entry, tuple):
            of, number = entry
            ids = (2 * BLOCK[life], 2 * BLOCK[life] + 1)
            name = f"{life}/{number}"
            lines += [
                Collected(number, ids, STEPS, name),
                Committed(number, of, dict.fromkeys(ids, SHAPE.epochs), name, f"h{number}"),
            ]
        else:
            lines.append(entry)
    collected = STEPS * sum(isinstance(line, Collected) for line in lines)
    return Ledger(tuple(lines), collected + lost_steps)


def sound() -> History:
    """Three train; B dies in iteration 3, half-way through its rollout; its next life enters."""
    journal = (
        generation(1, 0, A, B, C, restore=True),
        iteration(1, 1, 0, A, B, C),
        iteration(2, 1, 24, A, B, C),
        generation(2, 2, A, C),
        iteration(3, 2, 48, A, C),
        generation(3, 3, A, C, B2),
        iteration(4, 3, 64, A, C, B2),
    )
    stay: tuple[LedgerLine | tuple[int, int], ...] = (
        *(Formed(1, 0), (1, 1), (1, 2), Formed(2, 2), (2, 3), Formed(3, 3), (3, 4)),
    )
    return History(
        shape=SHAPE,
        journal=journal,
        lines_before_counters=len(journal) - 1,
        ledgers={
            A: books(A, *stay),
            B: books(B, Formed(1, 0), (1, 1), (1, 2), lost_steps=4),
            C: books(C, *stay),
            B2: books(B2, Formed(3, 3), (3, 4)),
        },
        live=frozenset({A, C, B2}),
        counters=Counters(64.0, 4.0, 0.0, 0.0, 0.0),
        seen=((1, 1), (1, 2), (2, 3), (3, 4)),
    )


def line(index: int, **changes: object) -> Change:
    """Fields of one line of the journal replaced."""

    def change(history: History) -> History:
        lines = list(history.journal)
        lines[index] = msgspec.structs.replace(lines[index], **changes)
        return replace(history, journal=tuple(lines))

    return change


def without(index: int) -> Change:
    def change(history: History) -> History:
        lines: tuple[JournalLine, ...] = history.journal
        return replace(history, journal=(*lines[:index], *lines[index + 1 :]))

    return change


def twice(index: int) -> Change:
    def change(history: History) -> History:
        lines = history.journal
        return replace(history, journal=(*lines[: index + 1], *lines[index:]))

    return change


def ledger(life: Life, edit: Callable[[list[LedgerLine]], object]) -> Change:
    """The lines of one ledger edited in place."""

    def change(history: History) -> History:
        lines = list(history.ledgers[life].lines)
        edit(lines)
        new = msgspec.structs.replace(history.ledgers[life], lines=tuple(lines))
        return replace(history, ledgers={**history.ledgers, life: new})

    return change


def commit(life: Life, number: int, **changes: object) -> Change:
    """Fields of one commit in a ledger replaced."""

    def edit(lines: list[LedgerLine]) -> None:
        for index, entry in enumerate(lines):
            if isinstance(entry, Committed) and entry.iteration == number:
                lines[index] = msgspec.structs.replace(entry, **changes)

    return ledger(life, edit)


def counters(**changes: float) -> Change:
    return lambda history: replace(history, counters=replace(history.counters, **changes))


BROKEN: dict[str, tuple[Change, str]] = {
    "an iteration is skipped": (without(1), "iteration 2 follows iteration 0"),
    "an iteration repeats": (twice(4), "iteration 3 follows iteration 3"),
    "a generation number repeats": (line(5, generation=2), "follows generation 2"),
    "a committed iteration is undone": (line(3, iteration=1), "but 2 is committed"),
    "an old generation commits": (line(4, generation=1), "of generation 1 during 2"),
    "a stranger is in an iteration": (
        line(4, ranks=(Share(*A, (0,), STEPS), Share(*B, (1,), STEPS))),
        "has ranks",
    ),
    "a block is used twice": (
        line(4, ranks=(Share(*A, (0,), STEPS), Share(*C, (0,), STEPS))),
        "uses an env block twice",
    ),
    "half a rollout is used": (
        line(4, ranks=(Share(*A, (0,), 4), Share(*C, (2,), STEPS))),
        "brought 4 env steps, not 8",
    ),
    "nothing is learnt": (line(4, state_hash="h2"), "changed nothing"),
    "the loss is not a number": (line(4, metrics={"policy_loss": float("nan")}), "no policy loss"),
    "steps of the state jump": (line(4, env_steps_total=72), "counts 72 env steps after 48"),
    "the source is no member": (line(3, source=Member(*B)), "no member"),
    "a newcomer is the source": (line(5, source=Member(*B2)), "not a survivor"),
    "a restore brings other state": (
        line(5, restore=True, iteration=2, state_hash="else"),
        "restores",
    ),
    "an epoch is missing": (commit(A, 3, entered={0: 2, 1: 2}), "entered {2: 2} mini-batches"),
    "an epoch too many": (commit(A, 3, entered={0: 3, 1: 4}), "not 3 each"),
    "an env is forgotten": (commit(A, 3, entered={0: 3}), "the journal has envs [0, 1]"),
    "a foreign env is used": (commit(A, 3, entered={0: 3, 1: 3, 9: 3}), "its ledger"),
    "a rollout is used again": (commit(A, 3, digest=f"{A}/2"), "committed rollout"),
    "a rollout comes from nowhere": (commit(A, 3, digest="magic"), "never collected"),
    "ranks disagree on the state": (commit(C, 3, state_hash="other"), "state other"),
    "a survivor's commit is missing": (
        ledger(C, lambda lines: lines.pop(7)),
        "in the journal, not in its ledger",
    ),
    "a survivor commits alone": (commit(A, 3, generation=1), "of generation 1 alone"),
    "a survivor goes back": (commit(A, 3, iteration=1), "committed iterations"),
    "a survivor drops a rollout": (
        ledger(A, lambda lines: lines.insert(3, Collected(2, (0, 1), STEPS, "dropped"))),
        "did not use 8 env steps",
    ),
    "a drop is not counted": (
        ledger(A, lambda lines: lines.append(Lost(8))),
        "env_steps_lost_total{dropped} is 0.0, by the ledgers 8",
    ),
    "lost steps are not counted": (counters(lost_died=0.0), "{died} is 0.0, by the ledgers 4"),
    "lost steps are counted as used": (counters(env_steps=92.0), "the journal has 64 to 88"),
    "steps are cut": (counters(lost_cut=8.0), "{cut} is 8.0"),
    "hashes differed": (counters(mismatches=1.0), "state_hash_mismatches_total is 1.0"),
    "status goes back": (
        lambda history: replace(history, seen=((1, 2), (2, 3), (2, 2))),
        "status went back",
    ),
}


def test_a_sound_history_is_accepted() -> None:
    assert violations(sound()) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_rejected(name: str) -> None:
    change, text = BROKEN[name]
    found = violations(change(sound()))
    assert any(text in violation for violation in found), found


def test_a_dropped_rollout_is_sound_when_it_is_reported() -> None:
    """A rank that fell behind takes the state of another, says so, and collects again."""
    history = ledger(
        C, lambda lines: lines.__setitem__(slice(4, 4), [Collected(3, (4, 5), 8, "x"), Lost(8)])
    )(sound())
    assert violations(replace(history, counters=replace(history.counters, lost_dropped=8.0))) == []


def test_what_a_dead_worker_did_not_live_to_commit_may_be_committed_by_its_peers() -> None:
    history = ledger(B, lambda lines: lines.pop())(sound())
    assert isinstance(history.ledgers[B].lines[-1], Collected)
    assert violations(history) == []


def test_iterations_wind_back_to_what_a_restore_brings() -> None:
    base = sound()
    lives = [A2, C2, B2]
    journal = (
        *base.journal[:5],
        generation(4, 2, *lives, restore=True),
        iteration(3, 4, 48, *lives),
    )
    old = (Formed(1, 0), (1, 1), (1, 2), Formed(2, 2), (2, 3))
    history = replace(
        base,
        journal=journal,
        lines_before_counters=len(journal),
        ledgers={
            A: books(A, *old),
            B: base.ledgers[B],
            C: books(C, *old),
            **{life: books(life, Formed(4, 2), (4, 3)) for life in lives},
        },
        live=frozenset(lives),
        counters=Counters(88.0, 4.0, 0.0, 0.0, 0.0),
        seen=((1, 2), (2, 3), (4, 2), (4, 3)),
    )
    assert violations(history) == []
