"""Reading the process table: start times, process groups, and ending what is left of a group."""

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessEntry:
    """What ``/proc/<pid>/stat`` says."""

    pid: int
    state: str
    group: int
    session: int
    start_ticks: int
    """Start time in clock ticks since boot: pid and start time together are never reused."""


def read(pid: int) -> ProcessEntry | None:
    """The entry of a process, zombies included, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses and may hold anything; fields count from after it.
    fields = text.rpartition(")")[2].split()
    return ProcessEntry(
        pid=pid,
        state=fields[0],
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def lives(pid: int, start_ticks: int) -> bool:
    """Whether this very process (not a later one with its number) still runs."""
    entry = read(pid)
    return entry is not None and entry.start_ticks == start_ticks and entry.state != "Z"


def members_of_session(session: int) -> list[ProcessEntry]:
    """Living processes of a session."""
    entries = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [e for e in entries if e is not None and e.session == session and e.state != "Z"]


def end_session(leader_pid: int, start_ticks: int, timeout_s: float) -> bool:
    """SIGKILL a worker and everything in its session, and wait until they are gone.

    A process with the leader's number but another start time is somebody else's: it and its
    session are left alone. Returns whether anything had to be ended. Raises `TimeoutError`.
    """
    entries = _session_of(leader_pid, start_ticks)
    for entry in entries:
        _kill_and_wait(entry, timeout_s)
    return bool(entries)


def kill_session(leader_pid: int, start_ticks: int) -> None:
    """SIGKILL everything that `end_session` would end, without waiting."""
    for entry in _session_of(leader_pid, start_ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, signal.SIGKILL)


def _session_of(leader_pid: int, start_ticks: int) -> list[ProcessEntry]:
    leader = read(leader_pid)
    if leader is not None and leader.start_ticks != start_ticks:
        return []
    entries = [e for e in members_of_session(leader_pid) if e.start_ticks >= start_ticks]
    if leader is not None and leader.session != leader_pid and leader.state != "Z":
        entries.append(leader)  # just forked: it leads no session yet
    return entries


def _kill_and_wait(entry: ProcessEntry, timeout_s: float) -> None:
    try:
        descriptor = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return
    try:
        if not lives(entry.pid, entry.start_ticks):
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(
                f"process {entry.pid} did not end within {timeout_s:g} s of SIGKILL; it waits in "
                "the kernel (see its wchan), and its device stays taken until it goes"
            )
    except ProcessLookupError:
        return  # it went by itself in between
    finally:
        os.close(descriptor)
