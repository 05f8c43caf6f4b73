"""What is saved of a worker that hangs, and of its peers, before it is ended.

One directory below ``DIR/evidence`` for each hang, one file for each worker: its page, what the kernel
says of each thread (state, wait channel, system call), Python stacks that the worker writes itself on a
signal (not when it is stopped), and those that py-spy reads from outside, where it is installed and
permitted.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotCounters

DUMP_TIMEOUT_S: Final = 2.0
"""Bound of one py-spy."""
STACKS_WAIT_S: Final = 0.3
"""How long workers may take to write their own stacks."""
KEPT: Final = 20
"""Directories that are kept; the oldest go."""
_STATUS_LINES: Final = ("Name", "State", "Threads", "VmRSS", "SigCgt", "voluntary", "nonvoluntary")


@dataclass(frozen=True)
class Suspect:
    """A worker to look at."""

    key: WorkerKey
    pid: int
    counters: SlotCounters


async def save(
    rundir: RunDir, hung: WorkerKey, reason: str, workers: Mapping[WorkerKey, Suspect]
) -> Path:
    """Save all that can be learned, within a few seconds; the directory. Raises OSError."""
    folder = rundir.evidence / f"slot-{hung.slot}-incarnation-{hung.incarnation}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reason.txt").write_text(f"{hung}: {reason}\n")
    before = {key: _stacks_size(rundir, key) for key in workers}
    for suspect in workers.values():
        _ask_for_stacks(suspect.pid)
    dumps = await asyncio.gather(*(_py_spy(suspect.pid) for suspect in workers.values()))
    await asyncio.sleep(STACKS_WAIT_S)
    for suspect, dump in zip(workers.values(), dumps, strict=True):
        text = [
            f"worker {suspect.key}, pid {suspect.pid}, {'hung' if suspect.key == hung else 'peer'}",
            f"\n--- page\n{suspect.counters}",
            f"\n--- kernel\n{_kernel(suspect.pid)}",
            f"\n--- its own stacks\n{_stacks(rundir, suspect.key, before[suspect.key])}",
            f"\n--- py-spy\n{dump}",
        ]
        (folder / f"worker-{suspect.key.slot}.txt").write_text("\n".join(text) + "\n")
    _prune(rundir.evidence)
    return folder


def _ask_for_stacks(pid: int) -> None:
    """Only a process that has a handler: the signal would end any other."""
    caught = _read(Path(f"/proc/{pid}/status")).partition("SigCgt:")[2].split()
    if caught and int(caught[0], 16) >> (signal.SIGUSR1 - 1) & 1:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return  # gone meanwhile


def _stacks_size(rundir: RunDir, key: WorkerKey) -> int:
    try:
        return rundir.stacks(key.slot).stat().st_size
    except FileNotFoundError:
        return 0


def _stacks(rundir: RunDir, key: WorkerKey, start: int) -> str:
    return _read(rundir.stacks(key.slot))[start:] or "nothing: stopped, or without the handler"


def _kernel(pid: int) -> str:
    """Of the process and of each of its threads."""
    lines = [
        x for x in _read(Path(f"/proc/{pid}/status")).splitlines() if x.startswith(_STATUS_LINES)
    ]
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except OSError as error:
        return f"not there any more: {error.strerror}"
    for thread in threads:
        state = _read(thread / "stat").rpartition(")")[2].split()[:1]
        name, wchan = _read(thread / "comm").strip(), _read(thread / "wchan") or "-"
        call = _read(thread / "syscall").strip() or "-"
        lines.append(
            f"thread {thread.name} {name}: {''.join(state)}, wchan {wchan}, syscall {call}"
        )
    return "\n".join(lines)


async def _py_spy(pid: int) -> str:
    """Its dump, or why there is none."""
    beside = Path(sys.executable).parent  # where pip puts it, also when that is not in PATH
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(beside))
    if program is None:
        return "py-spy is not installed"
    process = await asyncio.create_subprocess_exec(
        *(program, "dump", "--nonblocking", "--pid", str(pid)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DUMP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"py-spy did not end within {DUMP_TIMEOUT_S} s"
    return output.decode(errors="replace")


def _prune(folder: Path) -> None:
    old = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in old[:-KEPT]:
        shutil.rmtree(path)


def _read(path: Path) -> str:
    """The text of a file that may be gone, or not be ours to read: then nothing."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
