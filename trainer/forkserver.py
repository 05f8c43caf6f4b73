"""The fork server of a node: imports what a worker needs, once, and forks workers on request.

Imports are most of a worker's cold start. This process imports them and does nothing else: it has no
second thread, no process group and no CUDA context, so that its fork is as good as a fresh process.
A worker that it forks leads a session of its own and outlives it. It ends when its supervisor does.
"""

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rallypoint.daemon.shared import forking
from rallypoint.trainer import worker

_IMPORTED_LATE = ("torch._dynamo",)
"""Imported not by the worker's modules, but by the constructor of DDP: a second of CPU time."""


class ForkServer:
    """Serves one supervisor until that closes the socket."""

    def __init__(
        self, connection: socket.socket, worker_type: type[worker.Worker] = worker.Worker
    ) -> None:
        self._connection = connection
        self._worker_type = worker_type
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    def serve(self) -> None:
        """Fork and reap, until the supervisor is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the pipe is written to
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._say(forking.Warm(threads=threads()))
        while True:
            readable, _, _ = select.select([self._connection.fileno(), self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if self._connection.fileno() in readable:
                data, descriptors, _, _ = socket.recv_fds(self._connection, forking.MAX_BYTES, 1)
                if not data:
                    return
                self._fork(forking.decode_from_supervisor(data), descriptors[0])

    def _fork(self, request: forking.ForkWorker, output: int) -> None:
        count = threads()
        if count != 1:
            error = f"the fork server has {count} threads; a fork would not be sound"
            self._say(forking.ForkFailed(request.key, error))
            os.close(output)
            return
        try:
            pid = os.fork()
        except OSError as error:
            self._say(forking.ForkFailed(request.key, str(error)))
            os.close(output)
            return
        if pid == 0:
            self._become_worker(request.arguments, output)
        os.close(output)
        # Nobody but us reaps it: it is in the process table, if only as a zombie.
        self._say(forking.Forked(request.key, pid, worker.start_ticks(pid)))

    def _become_worker(self, arguments: Sequence[str], output: int) -> NoReturn:
        """In the child: what a new process would have, then the worker's program."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            os.close(self._wake)
            os.close(self._woken)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            code = worker.main(arguments, worker_type=self._worker_type)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # noqa: BLE001 - the last frame of this process: all goes to its log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            # Not reaped yet: even a zombie keeps its number, so the group is surely its own. Nobody may
            # be left in it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            self._say(forking.ForkEnded(found.si_pid, os.waitstatus_to_exitcode(status)))

    def _say(self, message: forking.ServerMessage) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(
                forking.encode(message)
            )  # else the next read says that it is gone


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def main(
    arguments: Sequence[str] | None = None, *, worker_type: type[worker.Worker] = worker.Worker
) -> int:
    """Serve the supervisor at the other end of the inherited descriptor ``--socket``."""
    parser = argparse.ArgumentParser(prog="rallypoint-forkserver")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--socket", type=int, required=True)
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # sent to all of a job, for its supervisor
        signal.signal(number, signal.SIG_IGN)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker must not write to, and so copy, what it shares
    with socket.socket(fileno=options.socket) as connection:
        ForkServer(connection, worker_type).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
