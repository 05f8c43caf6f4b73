"""`rallypoint status --watch` on a terminal, of a real supervisor."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.supervised import WAIT_S, supervised

pytestmark = [pytest.mark.slow]

CODE = "import sys; from rallypoint.daemon.cli import main; sys.exit(main(sys.argv[1:]))"


class Terminal:
    """A program on a terminal of its own, and what it has drawn there."""

    def __init__(self, *command: str) -> None:
        self.drawn = ""
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)

    def wait_for(self, text: str, after: int = 0) -> int:
        """Wait until it has drawn this, past that place; the place after it."""
        deadline_s = time.monotonic() + WAIT_S
        while (at := self.drawn.find(text, after)) < 0:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.drawn[-2000:]!r}"
            if select.select([self._ours], [], [], 1.0)[0]:
                try:
                    self.drawn += os.read(self._ours, 65536).decode(errors="replace")
                except OSError as error:  # nobody holds the other end any more
                    raise AssertionError(f"it ended: {self.drawn[-2000:]!r}") from error
        return at + len(text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._ours)


@contextmanager
def watching(directory: Path) -> Iterator[Terminal]:
    terminal = Terminal(sys.executable, "-c", CODE, "status", "--watch", "--dir", str(directory))
    try:
        yield terminal
    finally:
        terminal.close()


def test_it_shows_workers_and_changes_until_it_is_interrupted(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        run.wait_for_training(2)
        with watching(tmp_path / "run") as terminal:
            at = terminal.wait_for("training")
            at = terminal.wait_for("█", at)
            assert "\x1b[" in terminal.drawn, "in colour"
            terminal.wait_for("training", at)  # and again, a second later
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.process.wait(WAIT_S) == 0
        assert run.end() == 0


def test_when_the_supervisor_ends_it_says_so_in_one_line(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        run.wait_for_training(2)
        with watching(tmp_path / "run") as terminal:
            terminal.wait_for("training")
            assert run.end() == 0
            terminal.wait_for("has ended meanwhile; its log says why")
            assert terminal.process.wait(WAIT_S) == 3
            assert "Traceback" not in terminal.drawn
