"""A worker that prints without end neither fills the disk nor waits for anybody."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.injectors.job import FaultJob

pytestmark = [pytest.mark.slow, pytest.mark.faults]

BOUND = 1 << 18
MANY = 32 << 20
"""Far more than the bounds of all files together."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultJob]:
    running = FaultJob(
        tmp_path_factory.mktemp("noise") / "run",
        *("--workers", "2", "--set", f"log.worker_file_bytes={BOUND}"),
        *("--set", "log.worker_files=1"),
        command=("-m", "tests.faults.injectors.supervise_noise"),
    )
    try:
        running.settle(workers=2)
        yield running
        assert running.end() == 0
    finally:
        running.end_all()


def printed(job: FaultJob, life: int) -> int:
    """Bytes that a life of slot 0 has printed."""
    path = job.rundir.path / f"printed-0-{life}"
    return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


def on_disk(job: FaultJob) -> dict[str, int]:
    """Sizes of the files of slot 0, but for one that is being renamed."""
    found = {}
    for path in (job.rundir.path / "logs").glob("worker-0-*"):
        try:
            found[path.name] = path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def test_the_disk_is_not_filled_and_training_goes_on(job: FaultJob) -> None:
    life = job.status()["workers"][0]["incarnation"]
    job.wait_until(lambda: printed(job, life) > MANY, lambda: f"{printed(job, life)} bytes printed")
    job.wait_until(lambda: sum(on_disk(job).values()) < MANY // 4, lambda: str(on_disk(job)))
    older = (job.rundir.path / f"logs/worker-0-{life}.log.1").read_bytes()
    assert len(older) == BOUND
    *_, line, end = older.split(b"\n")
    assert line.startswith(b"noise ")
    assert end == b""
    job.settle(workers=2, iterations=5)


def test_a_supervisor_that_stands_still_does_not_hold_a_worker_up(job: FaultJob) -> None:
    """Nothing reads, nothing cuts: a pipe would be full after 64 KiB."""
    worker = job.status()["workers"][0]
    before, steps = printed(job, worker["incarnation"]), job.page(0).optimiser_steps
    job.process.send_signal(signal.SIGSTOP)
    try:
        job.wait_until(
            lambda: printed(job, worker["incarnation"]) > before + (1 << 20), lambda: "printing"
        )
        job.wait_until(lambda: job.page(0).optimiser_steps > steps, lambda: "an optimiser step")
    finally:
        job.process.send_signal(signal.SIGCONT)
    job.settle(workers=2)
    assert job.status()["workers"][0]["pid"] == worker["pid"]


def test_the_last_lines_of_a_dead_worker_are_quoted_and_old_lives_removed(job: FaultJob) -> None:
    (victim,) = [w for w in job.settle(workers=2)["workers"] if w["slot"] == 0]
    os.kill(victim["pid"], signal.SIGKILL)
    line = job.wait_logged("worker_exited", worker=f"local/0#{victim['incarnation']}")
    assert line["output_tail"], "it printed a moment before"
    assert all(text.startswith(("noise ", "x")) for text in line["output_tail"])
    assert (line["rank"], line["incarnation"]) == (victim["rank"], victim["incarnation"])

    def next_life() -> int | None:
        (worker,) = [w for w in job.status()["workers"] if w["slot"] == 0]
        life: int = worker["incarnation"]
        return life if printed(job, life) and life > victim["incarnation"] else None

    newest = job.wait_until(next_life, lambda: "the next life to print")
    assert {name.removesuffix(".1") for name in on_disk(job)} == {f"worker-0-{newest}.log"}
