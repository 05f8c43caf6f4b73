"""Trainers that take turns on this machine: a process each, which runs some iterations when it is asked.

So that rivals are measured in one run, turn by turn, and none has the machine at a better time. On its
standard input a process gets a number of iterations a line, and answers with a `Turn` as JSON on its
standard output; whatever else it prints goes to standard error.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

import msgspec

from rallypoint.ops.bench import processes
from rallypoint.ops.bench.processes import BenchError

BOUND_S: Final = 600.0
"""Of one turn."""


class Turn(msgspec.Struct, frozen=True):
    """What a trainer did in one turn."""

    env_steps: int
    seconds: float
    update_s: float
    """Part of them in which no env is stepped: advantages, the update, statistics."""


class Player:
    """A process that takes turns, from ``with`` to the end of the block."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, extra: Mapping[str, str] | None = None
    ) -> None:
        """``extra`` is added to its environment; standard error goes into ``log``."""
        self._name = name
        self._command = command
        self._log = log
        self._extra = extra

    def __enter__(self) -> Self:
        self._process = processes.start(self._command, self._log, self._extra, pipes=True)
        self._questions = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        return self

    def __exit__(self, *exception: object) -> None:
        processes.end(self._process, 5.0)
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):  # a question that it did not live to read
            self._questions.close()

    def play(self, iterations: int) -> Turn:
        """Let it run; nobody else should meanwhile. Raises `BenchError` when it ends, or takes longer
        than `BOUND_S`."""
        try:
            return self._ask(iterations)
        except (BrokenPipeError, msgspec.DecodeError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)  # by then it has said what it died of
            raise BenchError(
                f"{self._name} gave no answer to {iterations} iterations ({error}); the end of "
                f"{self._log}:\n{processes.tail(self._log, 15)}"
            ) from error

    def _ask(self, iterations: int) -> Turn:
        self._questions.write(b"%d\n" % iterations)
        self._questions.flush()
        if not select.select([self._answers], [], [], BOUND_S)[0]:
            raise BenchError(f"{self._name}: {iterations} iterations took over {BOUND_S:g} s")
        return msgspec.json.decode(self._answers.readline(), type=Turn)


def serve(make: Callable[[], Callable[[int], Turn]]) -> None:
    """The other side: make the trainer, and let it take turns until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        play = make()
        for line in sys.stdin:
            answers.write(msgspec.json.encode(play(int(line))) + b"\n")
            answers.flush()
