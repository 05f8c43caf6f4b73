"""Processes that a benchmark starts, each with an end: asked, then killed, also when we die first."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.errors import RallypointError

_PR_SET_PDEATHSIG: Final = 1
_PREFIX: Final = "RALLYPOINT_"


class BenchError(RallypointError):
    """A benchmark could not be carried out; the message says what was waited for, and where to look."""


def environment() -> dict[str, str]:
    """Ours, without settings of rallypoint (a result depends on the command line alone) and with one
    thread a process, as the supervisor gives it to its workers."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith(_PREFIX)}
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **inherited}


def start(
    command: Sequence[str],
    log: Path,
    extra: Mapping[str, str] | None = None,
    *,
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that writes both outputs into ``log``, or with ``pipes`` only standard error; it
    gets SIGTERM when this one dies. It leads a session of its own, as a worker does: a scheduler that
    shares by session then gives each process of a benchmark the same share."""
    # What a handler raises while Python forks is printed and forgotten: so SIGTERM waits for the fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    process = None
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env={**environment(), **(extra or {})},
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - a benchmark has no other threads
            )
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # the handler's, whatever it is: nobody will hold the process
            if process is not None:
                process.kill()
                process.wait()
            raise
    return process


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, and SIGKILL when it is still there after ``grace_s``."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def descendants(pid: int) -> list[int]:
    """All processes that descend from this one, whatever sessions they lead."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is read
        found += children.get(child, ())
    return found


def tail(path: Path, lines: int = 5) -> str:
    """The last lines of a log, for messages."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


class Deadline:
    """A bound on a wait."""

    def __init__(self, what: str, bound_s: float, log: Path) -> None:
        self._what, self._bound_s, self._log = what, bound_s, log
        self._end_s = time.monotonic() + bound_s

    def check(self) -> None:
        """Raises `BenchError` when the time is over."""
        if time.monotonic() > self._end_s:
            raise BenchError(
                f"{self._what} did not happen within {self._bound_s:g} s; the end of {self._log}:\n"
                f"{tail(self._log)}"
            )
