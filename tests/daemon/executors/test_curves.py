"""Curves follow the journal: every committed iteration is one point, whatever happened to a writer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.executors import eventfile, lineage
from rallypoint.daemon.executors.curves import Curves
from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes.facts import A, committed, formed, plan
from tests.fakes.tfevents import points, steps

FAR = WorkerKey("far", 0, 1)


class Run:
    """A journal and who draws from it."""

    def __init__(self, base: Path) -> None:
        self.journal = Journal(base / "journal.jsonl")
        self.directory = base / "curves"
        self.curves = self.writer()

    def writer(self, node: str = "local") -> Curves:
        """A writer that knows nothing yet, as of a supervisor that begins."""
        return Curves(self.directory, self.journal.path, job="job", node=node)

    def restore(self, generation: int, iteration: int = 0) -> None:
        opened = formed(A, generation, iteration)
        self.journal.generation(plan(generation, A, restore=True), opened, Config())

    def commit(self, *iterations: int, generation: int = 1, rank_0: WorkerKey = A) -> None:
        for iteration in iterations:
            report = committed(
                A,
                iteration,
                {rank_0: 60, WorkerKey("local", 7, 1): 40},
                generation=generation,
                state_hash=f"{generation}-{iteration}",
                wall_s=0.5,
                metrics={"reward_mean": float(generation), "kl": 0.25, "figure/speed": 2.0},
            )
            assert self.journal.commit(report) in ("new", "gap")


@pytest.fixture(name="run")
def fresh_run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    run.restore(1)
    yield run
    run.journal.close()


def test_a_point_has_the_tags_of_sonic_and_global_rates(run: Run) -> None:
    run.commit(1, 2)
    run.curves.follow()
    number, values = points(run.directory)[-1]
    assert number == 2
    assert values == {
        "policy/approxkl_avg": 0.25,
        "reward_mean": 1.0,
        "Env/speed": 2.0,
        "fps": 200.0,
        "tot_timesteps": 200.0,
        "tot_time": 1.0,
        "generation": 1.0,
        "world_size": 2.0,
        "samples": 100.0,
    }


def test_a_writer_that_died_before_the_point_is_made_up_for(run: Run) -> None:
    run.commit(1)
    run.curves.follow()
    run.commit(2, 3)  # and nobody draws: killed
    after = run.writer()
    run.commit(4)
    after.follow()
    run.commit(5)
    after.follow()
    assert steps(run.directory) == [1, 2, 3, 4, 5]
    assert points(run.directory)[-1][1]["tot_time"] == 2.5


def test_a_torn_point_is_written_again(run: Run) -> None:
    run.commit(1, 2)
    run.curves.follow()
    (path,) = run.directory.iterdir()
    os.truncate(path, path.stat().st_size - 3)
    run.writer().follow()
    assert steps(run.directory) == [1, 2]


def test_a_writer_that_has_nothing_to_add_begins_no_file(run: Run) -> None:
    run.commit(1)
    run.curves.follow()
    for _ in range(3):
        run.writer().follow()
    assert len(list(run.directory.iterdir())) == 1


class CountingTail(lineage.JournalTail):
    """Counts how often a part of the journal is read."""

    reads = 0

    def _lines(self, begin: int) -> list[lineage.Line]:
        self.reads += 1
        return super()._lines(begin)


def test_a_writer_reads_a_long_journal_a_few_times_however_many_iterations_it_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor waits for it: once for each iteration was half a minute after a day."""
    run.commit(*range(1, 200))
    run.curves.follow()
    tail = CountingTail(run.journal.path)
    after = run.writer()
    monkeypatch.setattr(after, "_tail", tail)
    after.follow()
    run.commit(200, 201)
    after.follow()
    assert steps(run.directory) == list(range(1, 202))
    assert tail.reads < 10


def test_only_the_newest_part_of_a_journal_is_read_where_the_points_are_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_WINDOW_BYTES", 2000)
    run.commit(*range(1, 100))
    run.curves.follow()
    tail = lineage.JournalTail(run.journal.path)
    assert 0 < len(tail.read()) < 20
    after = run.writer()
    run.commit(100)
    after.follow()
    assert steps(run.directory) == list(range(1, 101))


@pytest.mark.parametrize("killed", ["never", "after the restore", "after its first iteration"])
def test_points_that_a_restore_winds_back_are_replaced(run: Run, killed: str) -> None:
    run.commit(1, 2, 3, 4)
    run.curves.follow()
    run.restore(2, iteration=2)
    if killed == "never":
        run.curves.follow()
    run.commit(3, generation=2)
    if killed == "after its first iteration":
        run.curves = run.writer()
    elif killed == "after the restore":
        run.curves = run.writer()
        run.curves.follow()
    run.commit(4, 5, generation=2)
    run.curves.follow()
    found = points(run.directory)
    assert [(step, values["generation"]) for step, values in found] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
    ]
    # Not only readers forget: the files themselves have each step once.
    written = [point.step for path in run.directory.iterdir() for point in eventfile.read(path)]
    assert sorted(written) == [1, 2, 3, 4, 5]


def test_the_node_of_rank_0_draws_and_no_other(run: Run) -> None:
    far = run.writer("far")
    run.commit(1, 2)
    run.commit(3, 4, rank_0=FAR)
    for writer in (run.curves, far):
        writer.follow()
    run.commit(5)
    run.commit(6, rank_0=FAR)
    for writer in (far, run.curves):
        writer.follow()
    assert sorted(steps(run.directory)) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_stops_nothing_and_leaves_no_gap(run: Run) -> None:
    run.directory.write_text("in the way")
    run.commit(1)
    run.curves.follow()
    run.directory.unlink()
    run.commit(2)
    run.curves.follow()
    assert steps(run.directory) == [1, 2]


def test_files_of_others_stay(run: Run) -> None:
    run.directory.mkdir()
    other = run.directory / "events.out.tfevents.0000000001.other"
    other.write_bytes(b"not ours")
    run.commit(1)
    run.curves.follow()
    assert other.read_bytes() == b"not ours"


def test_a_long_journal_is_not_read_from_its_beginning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_WINDOW_BYTES", 2000)
    run.commit(*range(1, 41))
    tail = lineage.JournalTail(run.journal.path)
    recent = tail.lineage(since=39)
    assert 1 < min(recent) <= 39
    assert max(recent) == 40
    assert tail.read() == []
    assert list(tail.lineage(since=1)) == list(range(1, 41))
    run.writer().follow()
    run.commit(41)
    run.writer().follow()
    assert steps(run.directory) == list(range(1, 42))
