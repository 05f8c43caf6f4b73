"""The disk of a run's directory is full, for real: a file system of its own, filled to the last byte."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.injectors.job import FaultJob, by_rank

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SIZE = "24m"
RUN = ("-m", "rallypoint.daemon.cli", "run")


class Disk:
    """A small file system, and what fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as full:
                    if full.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root")
    place = tmp_path / "run"  # the log lies beside it, on a disk that has room
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place))
    subprocess.run(mount, check=True, timeout=10)
    yield Disk(place)
    subprocess.run(("umount", "--lazy", str(place)), check=True, timeout=10)  # noqa: S607


def test_training_goes_on_and_a_loss_heals_when_there_is_room(disk: Disk) -> None:
    job = FaultJob(disk.path, "--workers", "2", command=RUN)
    try:
        before = job.settle(workers=2)
        disk.fill()
        job.wait_logged("journal_write_failed")
        job.wait_logged("checkpoint_failed")
        job.settle(workers=2, iterations=5)
        assert job.status()["generation"] == before["generation"], "nobody noticed anything else"

        victim, survivor = by_rank(before, 1), by_rank(before, 0)
        job.kill(before, 1)
        job.wait_logged("state_write_failed")
        disk.free()
        after = job.settle(workers=2, newer_than={victim["slot"]: victim["incarnation"]})
        (stayed,) = [w for w in after["workers"] if w["slot"] == survivor["slot"]]
        assert stayed["pid"] == survivor["pid"]
        committed = job.wait_for(lambda s: (s["checkpoint"]["iteration"] or 0) > after["iteration"])
        assert committed["state"] == "running"
        assert job.end() == 0, job.log_path.read_text()[-4000:]
        assert job.processes_left() == []
    finally:
        job.end_all()


def test_a_stop_on_a_full_disk_ends_well_and_the_next_run_goes_on(disk: Disk) -> None:
    job = FaultJob(disk.path, "--workers", "2", command=RUN)
    try:
        before = job.settle(workers=2)
        disk.fill()
        job.wait_logged("journal_write_failed")
        assert job.end() == 0, job.log_path.read_text()[-4000:]
        assert job.processes_left() == []
        for event in ("checkpoint_failed", "state_write_failed", "supervisor_ended"):
            assert job.logged(event), f"{event}: what could not be written is said"
        assert not list(disk.path.glob(".*.tmp")), "half a file takes room that others need"
    finally:
        job.end_all()

    disk.free()
    again = FaultJob(disk.path, "--workers", "2", command=RUN)
    try:
        after = again.settle(workers=2)
        restored = again.wait_logged("checkpoint_restored")["iteration"]
        assert restored <= before["iteration"] + 1, "the newest that the disk had taken"
        assert after["generation"] > before["generation"]
        assert again.end() == 0, again.log_path.read_text()[-4000:]
    finally:
        again.end_all()
