"""Copies of the committed state: lent to writers, never changed under them, never too many."""

import random
from collections.abc import Callable

import torch

from rallypoint.trainer.elastic.copies import SnapshotCopies


def live(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5,), float(value)), "n": torch.tensor(int(value), dtype=torch.int64)}


def test_what_is_lent_stays_as_it_was_while_commits_go_on() -> None:
    copies = SnapshotCopies(live(0))
    copies.fill_from(live(1))
    lent, release = copies.lend()
    for value in (2, 3):
        copies.fill_from(live(value))
        assert torch.equal(copies.newest.tensors()["w"], torch.full((5,), float(value)))
        assert torch.equal(lent.tensors()["w"], torch.full((5,), 1.0))
    release()
    assert copies.size_bytes == 2 * lent.size_bytes


def test_without_a_loan_there_is_one_copy() -> None:
    copies = SnapshotCopies(live(0))
    for value in range(5):
        copies.fill_from(live(value))
    assert copies.size_bytes == copies.newest.size_bytes


def test_two_writers_of_two_snapshots_need_five_copies_at_most() -> None:
    """Any order of commits, loans and returns, with at most four loans."""
    rng = random.Random(1)  # noqa: S311 - no secret
    copies = SnapshotCopies(live(0))
    loans: list[tuple[int, dict[str, torch.Tensor], Callable[[], None]]] = []
    value = 0
    for _ in range(3000):
        match rng.choice(("commit", "lend", "return")):
            case "commit":
                value += 1
                copies.fill_from(live(value))
            case "lend" if len(loans) < 4:
                lent, release = copies.lend()
                loans.append((value, lent.tensors(), release))
            case "return" if loans:
                _, _, give_back = loans.pop(rng.randrange(len(loans)))
                give_back()
        for at, tensors, _ in loans:
            assert int(tensors["n"]) == at
        assert int(copies.newest.tensors()["n"]) == value
    assert copies.size_bytes <= 5 * copies.newest.size_bytes
