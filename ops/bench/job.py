"""A real job for a benchmark: ``rallypoint run`` in a directory of its own."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from rallypoint.daemon.executors.processes import end_earlier
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.network import LOOPBACK, Place
from rallypoint.ops.bench.processes import BenchError, Deadline

START_BOUND_S: Final = 120.0
STOP_BOUND_S: Final = 60.0
_POLL_S: Final = 0.05


class JournalReader:
    """Reads ``journal.jsonl`` while it grows; whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.lines: list[dict[str, Any]] = []
        """Everything read so far."""

    def read(self) -> list[dict[str, Any]]:
        """The lines that are new since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [line for raw in whole.splitlines() if (line := _line(raw)) is not None]
        self.lines += new
        return new


def _line(raw: bytes) -> dict[str, Any] | None:
    """A line of the journal; None for one that a killed supervisor did not write to its end."""
    try:
        line: dict[str, Any] = json.loads(raw)
    except ValueError:
        return None
    return line


class Job:
    """A supervisor with its workers, from ``with`` to the end of the block."""

    def __init__(
        self, directory: Path, workers: int, settings: Sequence[str], place: Place = LOOPBACK
    ) -> None:
        """``settings`` are further ``section.key=value``; ``place`` is where it runs."""
        self.rundir = RunDir(directory / "run")
        self.workers = workers
        self.log = directory / "supervisor.log"
        self.journal = JournalReader(self.rundir.journal)
        self._extra = {"GLOO_SOCKET_IFNAME": place.interface}
        self._command = [
            *(*place.launcher, sys.executable, "-m", "rallypoint.daemon.cli", "run"),
            *("--dir", str(self.rundir.path), "--job", "bench"),
            *("--workers", str(workers), "--metrics-port", "0", "--set", "log.format=json"),
            *(word for setting in settings for word in ("--set", setting)),
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._process.poll() is None:
            self.kill_all()  # nobody waits for its last checkpoint
        try:
            with AdminClient(self.rundir.path) as client:
                client.ask(command="stop")
                client.wait_for_end(STOP_BOUND_S)
        except (NoSupervisorError, ProtocolError, TimeoutError):
            pass  # it has ended by itself, or it is ended below
        processes.end(self._process, STOP_BOUND_S)
        end_earlier(self.rundir)  # nothing is left, whatever became of the supervisor

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    def start(self) -> None:
        """Start a supervisor on the directory, after the one before has ended."""
        self._process = processes.start(self._command, self.log, self._extra)

    def kill_and_start_again(self) -> None:
        """SIGKILL to the supervisor, and a new one on the same directory."""
        self._process.kill()
        self._process.wait()
        self.start()

    def kill_all(self) -> None:
        """SIGKILL to the supervisor and everything that it started, as when the machine is lost."""
        for pid in (self._process.pid, *processes.descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def wait_for_exit(self, bound_s: float) -> tuple[int, float]:
        """Its exit code, and how long it took to come. Raises `BenchError` after ``bound_s``."""
        begun_s = time.monotonic()
        deadline = Deadline("the end of the supervisor", bound_s, self.log)
        while (code := self._process.poll()) is None:
            deadline.check()
            time.sleep(_POLL_S / 5)
        return code, time.monotonic() - begun_s

    def status(self) -> dict[str, Any] | None:
        """The status document; None while there is no supervisor to ask yet. Raises `BenchError`
        when it has ended."""
        if self._process.poll() is not None:
            raise self._ended()
        try:
            with AdminClient(self.rundir.path) as client:
                document: dict[str, Any] = client.ask(command="status")["status"]
        except NoSupervisorError:
            return None
        return document

    def wait_for(
        self, what: str, condition: Callable[[dict[str, Any]], bool], bound_s: float
    ) -> dict[str, Any]:
        """The first status that meets the condition. Raises `BenchError` after ``bound_s``."""
        deadline = Deadline(what, bound_s, self.log)
        while True:
            status = self.status()
            if status is not None and condition(status):
                return status
            deadline.check()
            time.sleep(_POLL_S)

    def wait_for_end(self, bound_s: float) -> None:
        """Wait until the job has finished. Raises `BenchError` when it does not, or fails."""
        deadline = Deadline("the end of the job", bound_s, self.log)
        while self._process.poll() is None:
            deadline.check()
            time.sleep(_POLL_S)
        if self._process.returncode:
            raise self._ended()

    def wait_until_complete(self, bound_s: float) -> dict[str, Any]:
        """Wait until every slot trains in one generation, and all have made a step in it."""

        def complete(status: dict[str, Any]) -> bool:
            return (
                status["world_size"] == self.workers
                and all(worker["state"] == "training" for worker in status["workers"])
                and status["last_change"]["seconds"]["total"] is not None
            )

        return self.wait_for(f"training with {self.workers} workers", complete, bound_s)

    def _ended(self) -> BenchError:
        return BenchError(
            f"the job ended with exit code {self._process.returncode}; the end of {self.log}:\n"
            f"{processes.tail(self.log)}"
        )
