"""A supervisor with fake workers as a process of its own, and what a test asks of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.processes import WorkerProcess, read_earlier
from rallypoint.daemon.shared.rundir import RunDir
from tests.fakes.scrape import scrape

SCRIPT = Path(__file__).with_name("supervise_fakes.py")
WAIT_S = 120.0

Status = dict[str, Any]


class Supervised:
    """One life of a supervisor on a directory."""

    def __init__(self, directory: Path, *options: str, worker: dict[str, Any] | None = None):
        self.rundir = RunDir(directory)
        self.log_path = directory.with_suffix(".log")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(SCRIPT), "--dir", str(directory), "--metrics-port", "0"),
                    *("--set", "env.task=pointmass", "--set", "membership.detect_s=3.0"),
                    *("--set", "membership.join_debounce_s=0.2"),
                    *("--set", "log.format=json", *options),
                ],
                stderr=log,
                env={**os.environ, "FAKE_WORKER": json.dumps(worker or {})},
            )

    def status(self) -> Status:
        with AdminClient(self.rundir.path) as client:
            document: Status = client.ask(command="status")["status"]
        return document

    def wait_for(self, what: Callable[[Status], bool]) -> Status:
        """The first status that this is true of."""
        deadline_s = time.monotonic() + WAIT_S
        newest: Status | None = None
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the supervisor ended:\n{self.log_path.read_text()}")
            try:
                newest = self.status()
            except NoSupervisorError:
                newest = None  # not listening yet
            if newest is not None and what(newest):
                return newest
            time.sleep(0.02)
        raise AssertionError(f"not seen within {WAIT_S} s; last status {newest}")

    def wait_for_training(self, workers: int) -> Status:
        return self.wait_for(lambda s: trains(s, workers) and s["iteration"] >= 2)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def workers(self) -> list[WorkerProcess]:
        """Workers that may be alive, as the supervisor wrote them down."""
        return read_earlier(self.rundir)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of this name; one that is being written is none yet."""
        *whole, _ = self.log_path.read_text().split("\n")
        lines = map(json.loads, whole)
        return [line for line in lines if line["event"] == event]

    def metrics(self) -> dict[str, float]:
        return scrape(self.status()["metrics_url"])

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.rundir.journal.read_text().splitlines()]


@contextmanager
def supervised(
    directory: Path, *options: str, worker: dict[str, Any] | None = None
) -> Iterator[Supervised]:
    """A supervisor that is gone, with all its workers, at the end of the block."""
    running = Supervised(directory, *options, worker=worker)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(WAIT_S)
        for process in running.workers():
            proctable.end_session(process.pid, process.start_ticks, 5.0)


def trains(status: Status, workers: int) -> bool:
    """Exactly this many workers train in one generation."""
    states = [w["state"] for w in status["workers"]]
    return (
        status["world_size"] == workers
        and states.count("training") == workers
        and status["last_change"]["seconds"]["total"] is not None
    )


def pids(status: Status) -> dict[int, int | None]:
    return {w["slot"]: w["pid"] for w in status["workers"]}
