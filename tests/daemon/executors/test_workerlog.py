"""What workers print: bounded, the newest kept, and its end quoted."""

import os
from pathlib import Path

import pytest

from rallypoint.daemon.executors.workerlog import WorkerLog
from rallypoint.daemon.shared.config import LogSection
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

BOUND = 4096


def worker_log(
    directory: Path, incarnation: int = 1, *, slot: int = 0, lives: int = 2
) -> WorkerLog:
    section = LogSection(worker_file_bytes=BOUND, worker_files=lives)
    return WorkerLog(RunDir(directory), section, WorkerKey("local", slot, incarnation))


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory / "logs"))


def test_the_newest_output_is_kept_and_the_oldest_dropped(tmp_path: Path) -> None:
    log, path = worker_log(tmp_path), tmp_path / "logs/worker-0-1.log"
    older = path.with_name("worker-0-1.log.1")
    with log.open() as file:
        file.write(b"small\n")
        file.flush()
        assert not log.cut_if_large()
        assert path.read_bytes() == b"small\n"

        file.write(b"".join(b"line %06d\n" % number for number in range(100_000)))
        file.flush()
        assert log.cut_if_large()
        assert path.read_bytes() == b""
        assert len(older.read_bytes()) == BOUND
        assert older.read_bytes().endswith(b"line 099999\n")

        file.write(b"goes on\n")  # the descriptor that it has had from the start
        file.flush()
        assert path.read_bytes() == b"goes on\n"
        assert log.tail()[-2:] == ("line 099999", "goes on")
    assert names(tmp_path) == {path.name, older.name}


def test_what_cannot_be_kept_is_dropped_all_the_same(tmp_path: Path) -> None:
    """On a disk that is full nothing can be copied, and that is when the file must be cut."""
    log, path = worker_log(tmp_path), tmp_path / "logs/worker-0-1.log"
    with log.open() as file:
        (tmp_path / "logs/worker-0-1.log.1").mkdir()  # the copy cannot take its place
        file.write(b"x" * 2 * BOUND)
        file.flush()
        assert log.cut_if_large()
        assert path.read_bytes() == b""
        assert log.tail() == ()
    assert names(tmp_path) == {path.name, f"{path.name}.1"}


def test_a_file_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    log = worker_log(tmp_path)
    with log.open():
        (tmp_path / "logs/worker-0-1.log").unlink()
        log.cut_if_large()
        assert log.tail() == ()


@pytest.mark.parametrize("lives", [1, 3])
def test_the_files_of_the_last_lives_of_a_slot_stay(tmp_path: Path, lives: int) -> None:
    worker_log(
        tmp_path, 1, slot=10, lives=lives
    ).open().close()  # another slot, with the same digits
    for incarnation in range(1, 13):
        worker_log(tmp_path, incarnation, slot=1, lives=lives).open().close()
        (tmp_path / f"logs/worker-1-{incarnation}.log.1").touch()
    kept = [f"worker-1-{incarnation}.log" for incarnation in range(12, 12 - lives, -1)]
    assert names(tmp_path) == {"worker-10-1.log", *kept, *(f"{name}.1" for name in kept)}
