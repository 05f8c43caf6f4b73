"""Worker processes of this node: start, notice the end, sweep what a worker leaves behind.

Every worker is the leader of a session of its own and writes into a file, never into a pipe of the
supervisor, so that it outlives a supervisor's death unharmed. ``DIR/workers.json`` says which
processes may be alive, so that the next supervisor can take them over, or end them.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.executors.workerlog import WorkerLog
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_SCRUBBED: Final = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    }
)
_END_TIMEOUT_S: Final = 5.0


class WorkerProcess(msgspec.Struct, frozen=True):
    """One entry of ``workers.json``."""

    key: WorkerKey
    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessExit:
    """A worker's process is gone and its group swept."""

    process: WorkerProcess
    code: int | None
    signal: int | None
    tail: tuple[str, ...]
    """Last lines that this life of the worker wrote."""

    @property
    def how(self) -> str:
        """Code or signal in words."""
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        if self.code is None:
            return "unknown: it was adopted"
        return f"exit code {self.code}"


@dataclass
class _Running:
    process: WorkerProcess
    popen: subprocess.Popen[bytes] | None
    """None: adopted, the child of a supervisor that is gone. Nobody can say how it ends."""
    descriptor: int | None
    """The process's pidfd: readable once it has ended. None: it had ended before it was adopted."""
    log: WorkerLog
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def worker_environment(inherited: Mapping[str, str], interface: str) -> dict[str, str]:
    """Environment of a worker: no trace of another launcher, one thread per worker unless the
    operator says otherwise, and the network interface of the collectives, never guessed."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _SCRUBBED and not name.startswith("TORCHELASTIC_")
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["GLOO_SOCKET_IFNAME"] = interface
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def read_earlier(rundir: RunDir) -> list[WorkerProcess]:
    """Workers that an earlier supervisor of this directory may have left."""
    try:
        return msgspec.json.decode(rundir.workers.read_bytes(), type=list[WorkerProcess])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{rundir.workers}: damaged ({error}); end the workers that may still run on this "
            f"directory (their command line names {rundir.path}), then remove the file"
        ) from error


def end_earlier(rundir: RunDir) -> list[WorkerProcess]:
    """End every worker that an earlier supervisor left, and return those that were alive.

    Raises `TimeoutError` when one does not end, and `ConfigError` for a damaged file.
    """
    ended = [process for process in read_earlier(rundir) if end(process)]
    write_atomically(rundir.workers, b"[]", durable=False)
    return ended


def end(process: WorkerProcess) -> bool:
    """End a worker and its session; whether anything was alive. Raises `TimeoutError`."""
    return proctable.end_session(process.pid, process.start_ticks, _END_TIMEOUT_S)


class ProcessExecutor:
    """Starts workers and reports each end once, through ``on_exit``, from the event loop."""

    def __init__(
        self,
        rundir: RunDir,
        command: Callable[[WorkerKey], Sequence[str]],
        environment: Mapping[str, str],
        *,
        log_bytes: int,
        on_exit: Callable[[ProcessExit], None],
    ) -> None:
        self._rundir = rundir
        self._command = command
        self._environment = environment
        self._log_bytes = log_bytes
        self._on_exit = on_exit
        self._running: dict[WorkerKey, _Running] = {}

    def start(self, key: WorkerKey) -> WorkerProcess:
        """Start the worker of a slot. Raises OSError when it cannot be started."""
        log = WorkerLog(self._rundir.worker_log(key.slot), self._log_bytes)
        with log.open_for(key) as output:
            popen = subprocess.Popen(
                list(self._command(key)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                start_new_session=True,
            )
        entry = proctable.read(popen.pid)
        if entry is None:
            raise ProcessLookupError(f"worker {key} (pid {popen.pid}) is not in the process table")
        process = WorkerProcess(key, popen.pid, entry.start_ticks)
        descriptor = os.pidfd_open(popen.pid)
        running = _Running(process, popen, descriptor, log)
        self._running[key] = running
        self._write()
        asyncio.get_running_loop().add_reader(descriptor, self._ended, running)
        return process

    def adopt(self, processes: Sequence[WorkerProcess]) -> None:
        """Take over workers of an earlier supervisor. Each end is reported as any other, that of a
        process which is gone already at once; how it came stays unknown."""
        loop = asyncio.get_running_loop()
        for process in processes:
            log = WorkerLog(self._rundir.worker_log(process.key.slot), self._log_bytes)
            log.go_on()
            descriptor = _open_living(process)
            running = _Running(process, None, descriptor, log)
            self._running[process.key] = running
            if descriptor is None:
                loop.call_soon(self._ended, running)
            else:
                loop.add_reader(descriptor, self._ended, running)
        self._write()

    def kill(self, key: WorkerKey) -> None:
        """SIGKILL to the worker's process group; its end is reported as any other."""
        if key in self._running:
            _sweep(self._running[key])

    def process(self, key: WorkerKey) -> WorkerProcess | None:
        """The process of a worker that has not been reported gone."""
        running = self._running.get(key)
        return running.process if running else None

    def running(self) -> list[WorkerKey]:
        return list(self._running)

    async def end_all(self) -> None:
        """Kill every worker and wait until each is gone."""
        waiting = [running.gone for running in self._running.values()]
        for key in self.running():
            self.kill(key)
        await asyncio.gather(*(gone.wait() for gone in waiting))

    def rotate_logs(self) -> None:
        """Cut output files that have grown past their bound."""
        for running in self._running.values():
            running.log.rotate_if_large()

    def _ended(self, running: _Running) -> None:
        if running.descriptor is not None:
            asyncio.get_running_loop().remove_reader(running.descriptor)
            os.close(running.descriptor)
        _sweep(running)
        status = None if running.popen is None else running.popen.wait()
        del self._running[running.process.key]
        self._write()
        running.gone.set()
        self._on_exit(
            ProcessExit(
                running.process,
                code=status if status is not None and status >= 0 else None,
                signal=-status if status is not None and status < 0 else None,
                tail=running.log.tail(),
            )
        )

    def _write(self) -> None:
        processes = [running.process for running in self._running.values()]
        # Not durable: a power cut ends the workers as well.
        write_atomically(self._rundir.workers, msgspec.json.encode(processes), durable=False)


def _open_living(process: WorkerProcess) -> int | None:
    """A pidfd of this very process; None when it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if proctable.lives(process.pid, process.start_ticks):
        return descriptor
    os.close(descriptor)
    return None


def _sweep(running: _Running) -> None:
    """SIGKILL to the worker and whatever it started in its group."""
    process = running.process
    if running.popen is None:
        # Somebody else reaps it, and then its number is free: look at start times.
        proctable.kill_session(process.pid, process.start_ticks)
        return
    try:
        # Not reaped yet: even a zombie keeps its number, so the group is surely its own.
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left; a group of zombies only may answer EPERM on some kernels
