"""Talking to a running supervisor over its admin socket."""

import argparse
import json
from pathlib import Path
from typing import Any, Final, Self

from rallypoint.daemon.shared import unixsocket
from rallypoint.daemon.shared.errors import ProtocolError, RallypointError
from rallypoint.daemon.shared.rundir import RunDir

ANSWER_TIMEOUT_S: Final = 10.0
EXIT_NO_SUPERVISOR: Final = 3


class NoSupervisorError(RallypointError):
    """Nobody answers on the admin socket of this directory."""

    exit_code = EXIT_NO_SUPERVISOR


class AdminClient:
    """One connection. Raises `NoSupervisorError` when nobody answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = RunDir(directory).admin_socket
        try:
            self._socket = unixsocket.connect(path, ANSWER_TIMEOUT_S)
        except OSError as error:
            raise NoSupervisorError(
                f"no supervisor answers in {directory} ({path.name}: {error.strerror or error}); "
                "look at --dir, or start one with `rallypoint run`"
            ) from error
        self._lines = self._socket.makefile("rb")

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer. Raises `ProtocolError` when it is refused."""
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._read()
        except OSError as error:
            raise self._gone(error) from error
        if answer is None:
            raise self._gone(None)
        if "error" in answer:
            raise ProtocolError(f"the supervisor in {self._directory} refused: {answer['error']}")
        return answer

    def wait_for_end(self, timeout_s: float) -> dict[str, Any] | None:
        """After an accepted ``stop`` or ``drain``: how the supervisor ended, or None when it went
        away without a word. Raises `TimeoutError`."""
        self._socket.settimeout(timeout_s)
        try:
            return self._read()
        except ConnectionError:
            return None

    def _read(self) -> dict[str, Any] | None:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            return None  # nothing, or the half of an answer: it has gone
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self, error: OSError | None) -> NoSupervisorError:
        """``error``: of a connection that was not closed in order."""
        if isinstance(error, TimeoutError):
            text = f"did not answer within {ANSWER_TIMEOUT_S:g} s; look at its log and at the load there"
        else:
            text = "has ended meanwhile; its log says why, and `rallypoint run` goes on from there"
        return NoSupervisorError(f"the supervisor in {self._directory} {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.close()
        self._socket.close()


def add_dir(parser: argparse.ArgumentParser) -> None:
    """The ``--dir`` of every command that talks to a supervisor."""
    parser.add_argument(
        "--dir", type=Path, required=True, metavar="DIR", help="directory of the run"
    )
