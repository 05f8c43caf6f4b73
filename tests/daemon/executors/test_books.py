"""What a supervisor has counted, read by the next one."""

from pathlib import Path

import pytest

from rallypoint.daemon.executors.books import Books, BooksFile, CheckpointFact, Total
from rallypoint.daemon.executors.metrics import Metrics
from tests.fakes.facts import A

BOOKS = Books(
    heard=((A, 7),),
    totals=(Total("iterations_total", {}, 3.0),),
    accounted=((A, 60),),
    dead=((A, 80, "died"),),
    journal_bytes=1000,
    checkpoint=CheckpointFact(1, 2, "p", 3.0),
    change=(1, 2.0, 3.0, 4.0),
)


def test_the_newest_write_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "books.page"
    file = BooksFile(path)
    assert file.read() is None
    for number in range(5):
        file.write(Books(journal_bytes=number))
    file.write(BOOKS)
    assert BooksFile(path).read() == BOOKS, "though nobody closed it"
    BooksFile(path).write(Books(journal_bytes=9))
    newest = BooksFile(path).read()
    assert newest is not None
    assert newest.journal_bytes == 9


@pytest.mark.parametrize("at", [0, 1])
def test_a_torn_half_gives_way_to_the_other(tmp_path: Path, at: int) -> None:
    path = tmp_path / "books.page"
    file = BooksFile(path)
    for number in (1, 2 + at):
        file.write(Books(journal_bytes=number))
    data = bytearray(path.read_bytes())
    torn = data.index(b'"journal_bytes":%d' % (2 + at))
    data[torn + 3] ^= 0xFF
    path.write_bytes(data)
    left = BooksFile(path).read()
    assert left is not None
    assert left.journal_bytes == 1


def test_counters_go_on_and_unknown_ones_are_left_out() -> None:
    before, after = Metrics(), Metrics()
    before.add("iterations_total", 3)
    before.add("env_steps_lost_total", 5, reason="died")
    other = (Total("of_a_newer_version_total", {}, 1.0), Total("iterations_total", {"x": "y"}, 1.0))
    after.restore((*before.totals(), *other))
    after.add("iterations_total")
    assert {(t.name, t.value) for t in after.totals()} == {
        ("iterations_total", 4.0),
        ("env_steps_lost_total", 5.0),
    }
