"""Worker processes of this node: start, notice the end, sweep what a worker leaves behind.

Every worker is the leader of a session of its own and writes into a file, never into a pipe of the
supervisor, so that it outlives a supervisor's death unharmed. ``DIR/workers.json`` says which
processes may be alive, so that the next supervisor can take them over, or end them.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.executors.forkserver import ForkServer
from rallypoint.daemon.executors.workerlog import OutputFile, WorkerLog
from rallypoint.daemon.shared import forking
from rallypoint.daemon.shared.config import LogSection
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_SCRUBBED: Final = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),  # no worker speaks for the service
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    }
)
_END_TIMEOUT_S: Final = 5.0
_STATUS_WITHIN_S: Final = 1.0
"""How long the end of a forked worker waits for the fork server to say how it came."""
_LOOK_S: Final = 1.0
_LOOK_SOON_S: Final = 0.1
"""Between looks at the size of output files, and while one of them grows fast."""
_PROGRAM_WORDS: Final = 3
"""Words of a worker's command line before its arguments: python -m module."""

_log = structlog.get_logger(__name__)


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
            return "unknown: its parent is gone"
        return f"exit code {self.code}"


@dataclass
class _Running:
    process: WorkerProcess
    popen: subprocess.Popen[bytes] | None
    """None: not our child. Adopted, and nobody can say how it ends, or the fork server's."""
    descriptor: int | None
    """The process's pidfd: readable once it has ended. None: it had ended before it was adopted."""
    log: WorkerLog
    forked: bool = False
    """The fork server says how it ends, unless that ends first."""
    status: int | None = None
    """What it said: exit code, or the negative number of the signal."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def worker_command(rundir: RunDir) -> Callable[[WorkerKey], Sequence[str]]:
    """The command line of each worker of this run."""

    def command(key: WorkerKey) -> list[str]:
        return [
            *(sys.executable, "-m", "rallypoint.trainer.worker"),
            *("--dir", str(rundir.path), "--node", key.node),
            *("--slot", str(key.slot), "--incarnation", str(key.incarnation)),
        ]

    return command


def worker_environment(inherited: Mapping[str, str], interface: str) -> dict[str, str]:
    """Environment of a worker: no trace of another launcher, one thread per worker and NCCL on this
    interface unless the operator says otherwise, gloo on this interface in any case: both would guess
    one from the host's name. ``=``: NCCL would take the name for a prefix."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _SCRUBBED and not name.startswith("TORCHELASTIC_")
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["GLOO_SOCKET_IFNAME"] = interface
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
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
        section: LogSection,
        on_exit: Callable[[ProcessExit], None],
        on_forked: Callable[[WorkerProcess], None] = lambda _: None,
        on_failed: Callable[[WorkerKey, OSError], None] = lambda _key, _error: None,
    ) -> None:
        """``on_forked`` and ``on_failed`` say what became of a start that was left to the fork
        server."""
        self._rundir = rundir
        self._command = command
        self._environment = environment
        self._section = section
        self._on_exit = on_exit
        self._on_forked = on_forked
        self._on_failed = on_failed
        self._forks: ForkServer | None = None
        self._ending = False
        self._running: dict[WorkerKey, _Running] = {}
        self._logs: dict[WorkerKey, WorkerLog] = {}
        """Of the workers that the fork server was asked for."""

    def use_fork_server(self) -> None:
        """Start the fork server; from now on workers come from it. Raises OSError."""
        self._forks = ForkServer(
            self._rundir,
            self._environment,
            on_forked=self._forked,
            on_refused=self._not_forked,
            on_ended=self._fork_ended,
        )
        self._forks.start()

    def start(self, key: WorkerKey) -> WorkerProcess | None:
        """Start the worker of a slot. None: the fork server was asked, and ``on_forked`` or
        ``on_failed`` will follow. Raises OSError when it cannot be started."""
        if self._forks is None or not self._forks.usable:
            return self._spawn(key)
        log = WorkerLog(self._rundir, self._section, key)
        with log.open() as output:
            # The program and its interpreter are there already.
            arguments = [str(part) for part in self._command(key)][_PROGRAM_WORDS:]
            self._logs[key] = log
            self._forks.ask(key, arguments, output.fileno())
        return None

    def _spawn(self, key: WorkerKey) -> WorkerProcess:
        log = WorkerLog(self._rundir, self._section, key)
        with log.open() as output:
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
        self._add(_Running(process, popen, os.pidfd_open(popen.pid), log))
        self._write()
        return process

    def _add(self, running: _Running) -> None:
        """Look for its end from now on; at once, when it has come already."""
        loop = asyncio.get_running_loop()
        self._running[running.process.key] = running
        if running.descriptor is None:
            loop.call_soon(self._ended, running)
        else:
            loop.add_reader(running.descriptor, self._ended, running)

    # --- the fork server ------------------------------------------------------------------------

    def _forked(self, message: forking.Forked) -> None:
        process = WorkerProcess(message.key, message.pid, message.start_ticks)
        log = self._logs.pop(message.key)
        self._add(_Running(process, None, _open_living(process), log, forked=True))
        self._write()
        self._on_forked(process)

    def _not_forked(self, key: WorkerKey) -> None:
        del self._logs[key]
        if self._ending:
            return
        try:
            process = self._spawn(key)
        except OSError as error:
            self._on_failed(key, error)
        else:
            self._on_forked(process)

    def _fork_ended(self, message: forking.ForkEnded) -> None:
        for running in list(self._running.values()):
            if running.forked and running.process.pid == message.pid:
                running.status = message.status
                if running.descriptor is None:
                    self._gone(running)

    def adopt(self, processes: Sequence[WorkerProcess]) -> None:
        """Take over workers of an earlier supervisor. Each end is reported as any other, that of a
        process which is gone already at once; how it came stays unknown."""
        for process in processes:
            log = WorkerLog(self._rundir, self._section, process.key)
            self._add(_Running(process, None, _open_living(process), log))
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
        """Kill every worker, also one that is being forked, and wait until each is gone."""
        self._ending = True
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while (  # noqa: ASYNC110 - bounded, and only at the end
            self._forks is not None and self._forks.pending() and time.monotonic() < deadline_s
        ):
            await asyncio.sleep(0.01)
        waiting = [running.gone for running in self._running.values()]
        for key in self.running():
            self.kill(key)
        await asyncio.gather(*(gone.wait() for gone in waiting))
        if self._forks is not None:
            self._forks.close()

    async def bound_logs(self) -> None:
        """Keep output files at their bound, for ever; where one has been too large, look again soon."""
        ours = (self._rundir.fork_server_log, self._rundir.wandb_log)
        others = [OutputFile(path, self._section) for path in ours]
        while True:
            large = False
            for file in (*others, *(running.log for running in self._running.values())):
                large |= await asyncio.to_thread(file.cut_if_large)
            await asyncio.sleep(_LOOK_SOON_S if large else _LOOK_S)

    def _ended(self, running: _Running) -> None:
        loop = asyncio.get_running_loop()
        if running.descriptor is not None:
            loop.remove_reader(running.descriptor)
            os.close(running.descriptor)
            running.descriptor = None
        server_tells = self._forks is not None and self._forks.usable
        if running.forked and running.status is None and server_tells:
            loop.call_later(_STATUS_WITHIN_S, self._gone, running)
        else:
            self._gone(running)

    def _gone(self, running: _Running) -> None:
        """The process has ended, and what can be known of that is."""
        if running.gone.is_set():
            return
        _sweep(running)
        status = running.status if running.popen is None else running.popen.wait()
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
        try:
            # Not durable: a power cut ends the workers as well.
            write_atomically(self._rundir.workers, msgspec.json.encode(processes), durable=False)
        except OSError as error:
            # The start or end that it is about has happened, and is told all the same. A worker that the
            # next supervisor does not know of leaves by itself.
            path = str(self._rundir.workers)
            _log.error("workers_not_written", path=path, error=error.strerror or str(error))


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
