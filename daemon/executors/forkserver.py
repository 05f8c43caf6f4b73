"""The supervisor's end of the fork server: a process that forks workers which need not import.

What cannot be forked (the server has died, does not answer, or may not fork) goes to ``on_refused``,
and the worker is started as a new program instead.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import structlog

from rallypoint.daemon.shared import forking
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

WARM_WITHIN_S: Final = 120.0
ANSWER_WITHIN_S: Final = 5.0
_END_WITHIN_S: Final = 5.0

_log = structlog.get_logger(__name__)


class ForkServer:
    """One server at a time; a warm one that dies is replaced. Used from the event loop only."""

    program: ClassVar[Sequence[str]] = ("-m", "rallypoint.trainer.forkserver")
    """What Python runs; in tests also a server of other workers."""

    def __init__(
        self,
        rundir: RunDir,
        environment: Mapping[str, str],
        *,
        on_forked: Callable[[forking.Forked], None],
        on_refused: Callable[[WorkerKey], None],
        on_ended: Callable[[forking.ForkEnded], None],
    ) -> None:
        self._rundir = rundir
        self._environment = environment
        self._on_forked = on_forked
        self._on_refused = on_refused
        self._on_ended = on_ended
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warm = False
        self._asked: dict[WorkerKey, tuple[bytes, int]] = {}
        """Not answered yet: what is asked, and the output file."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether workers may be asked of it."""
        return self._socket is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server; it is used as soon as it is warm. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = self._rundir.fork_server_log
        path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, path.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *self.program),
                    *("--dir", str(self._rundir.path), "--socket", str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket, self._warm = ours, False
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._expect(WARM_WITHIN_S)

    def ask(self, key: WorkerKey, arguments: Sequence[str], output: int) -> None:
        """Fork a worker that writes to the descriptor ``output``, which is copied."""
        request = forking.encode(forking.ForkWorker(key, tuple(arguments)))
        self._asked[key] = (request, os.dup(output))
        if self._warm:
            self._send(key)

    def pending(self) -> bool:
        """Whether the server may be forking a worker right now."""
        return self._warm and bool(self._asked)

    def close(self) -> None:
        """End the server; its workers live on. What was asked and not sent is forgotten."""
        self._drop()
        for _, output in self._asked.values():
            os.close(output)
        self._asked.clear()

    def _send(self, key: WorkerKey) -> None:
        if self._socket is None or key not in self._asked:
            return  # lost meanwhile
        request, output = self._asked[key]
        try:
            socket.send_fds(self._socket, [request], [output])
        except OSError as error:  # gone, or so stuck that its buffer is full
            self._lose(str(error))
        else:
            self._expect(ANSWER_WITHIN_S)

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(forking.MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                data, why = b"", str(error)
            else:
                why = "it has ended"
            if not data:
                self._lose(why)
                return
            self._take(forking.decode_from_server(data))

    def _take(self, message: forking.ServerMessage) -> None:
        match message:
            case forking.Warm(threads=threads):
                self._expect(None)
                if threads != 1:
                    self._lose(f"it has {threads} threads, and a fork would not be sound")
                    return
                self._warm = True
                _log.info("fork_server_warm", pid=self.pid)
                for key in list(self._asked):
                    self._send(key)
            case forking.Forked(key=key):
                self._answered(key)
                self._on_forked(message)
            case forking.ForkFailed(key=key, error=error):
                self._answered(key)
                _log.error("worker_not_forked", worker=key, error=error)
                self._on_refused(key)
            case forking.ForkEnded():
                self._on_ended(message)

    def _answered(self, key: WorkerKey) -> None:
        _, output = self._asked.pop(key)
        os.close(output)
        self._expect(ANSWER_WITHIN_S if self._asked else None)

    def _expect(self, within_s: float | None) -> None:
        """The next answer is due within this time; None: none is."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if within_s is not None:
            text = f"no answer within {within_s:g} s"
            self._deadline = asyncio.get_running_loop().call_later(within_s, self._lose, text)

    def _lose(self, why: str) -> None:
        """The server is of no use any more: a warm one is replaced, what was asked of it is not."""
        was_warm, pid = self._warm, self.pid
        self._drop()
        _log.error("fork_server_lost", pid=pid, reason=why, replaced=was_warm)
        asked, self._asked = self._asked, {}
        if was_warm:
            try:
                self.start()
            except OSError as error:
                _log.error("fork_server_not_started", error=str(error))
        for key, (_, output) in asked.items():
            os.close(output)
            self._on_refused(key)

    def _drop(self) -> None:
        self._expect(None)
        self._warm = False
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._process is not None:
            # It holds nothing: what it forked lives in sessions of its own.
            self._process.kill()
            self._process.wait(_END_WITHIN_S)
            self._process = None
