"""Feeds Weights & Biases from a run's journal: ``python -m rallypoint.ops.wandbfeed DIR RUN``.

Started by the supervisor, which never loads the client library. Ends, after it has fed what is left,
when its standard input does: with the supervisor, whatever becomes of that. Only the node that has rank 0 in an iteration feeds it. A step
once fed cannot be taken back there: what a restore winds back and trains again is fed once, as it was
first. Exit code 1 when the library fails.
"""

import argparse
import fcntl
import importlib
import math
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from rallypoint.daemon.executors.curves import values_of
from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.executors.lineage import JournalTail, Line
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import RECORDED, from_json
from rallypoint.daemon.shared.rundir import RunDir

_EVERY_S: Final = 0.5


class Run(Protocol):
    """What is used of ``wandb.Run``."""

    def log(self, data: Mapping[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


class Fed(msgspec.Struct, frozen=True):
    """How far the run has been fed; kept in a file."""

    step: int = 0
    total_s: float = 0.0


class Feed:
    """Hands committed iterations on, each once, in order."""

    def __init__(self, run: Run, journal: Path, node: str, state: Path) -> None:
        self._run = run
        self._tail = JournalTail(journal)
        self._node = node
        self._state = state
        self._fed = Fed()
        if state.exists():
            self._fed = msgspec.json.decode(state.read_bytes(), type=Fed)
        self._begun = False

    def follow(self) -> None:
        """Feed what the journal has got since the last call."""
        if self._begun:
            lines = self._tail.read()
        else:
            lineage = self._tail.lineage(since=self._fed.step)
            lines = [line for _, line in sorted(lineage.items())]
            self._begun = True
        for line in lines:
            if line.event == "iteration" and line.iteration > self._fed.step:
                self._take(line)

    def _take(self, line: Line) -> None:
        self._fed = Fed(line.iteration, self._fed.total_s + line.wall_s)
        if line.ranks[0].node == self._node:
            values = values_of(line, self._fed.total_s)
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            self._run.log(finite, step=line.iteration)
            write_atomically(self._state, msgspec.json.encode(self._fed), durable=False)


def open_run(config: Config, rundir: RunDir, run_id: str) -> Run:
    """The run of this job, begun or resumed. Raises ImportError without the extra."""
    wandb: Any = importlib.import_module("wandb")
    run: Run = wandb.init(
        project=config.curves.wandb_project,
        mode=config.curves.wandb_mode,
        id=run_id,
        name=config.job.name,
        resume="allow",
        dir=str(rundir.wandb),
        config=msgspec.to_builtins({s: getattr(config, s) for s in RECORDED}),
    )
    return run


def main(arguments: list[str] | None = None) -> int:
    """Feed until standard input ends."""
    parser = argparse.ArgumentParser(prog="rallypoint-wandb-feed")
    parser.add_argument("directory", type=Path)
    parser.add_argument("run_id")
    options = parser.parse_args(arguments)
    rundir = RunDir(options.directory)
    config = from_json(rundir.config.read_bytes())
    with (rundir.wandb / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the feed of a supervisor that was killed ends first
        run = open_run(config, rundir, options.run_id)
        feed = Feed(run, rundir.journal, config.node.name, rundir.wandb / "fed.json")
        while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
            feed.follow()
        feed.follow()
        run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
