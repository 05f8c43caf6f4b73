"""``rallypoint bench throughput``: what training costs over simulating, and elasticity over DDP.

Three rates of env steps a second on the same machine, one after the other, in several rounds: the
simulator alone, the trainer under plain DDP, and a real elastic job. Ratios are taken within a round.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import from_text, load, parse_assignment, to_json
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.job import Job
from rallypoint.ops.bench.processes import BenchError, Deadline

WARM_UP: Final = 3
"""Iterations at the start that are not timed."""
BOUND_S: Final = 900.0
"""Of one measurement."""
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Round:
    """Env steps a second of all workers together."""

    env_only: float
    plain: float
    elastic: float

    @property
    def training_over_env(self) -> float:
        """Share of the simulator's own rate that the elastic job keeps."""
        return self.elastic / self.env_only

    @property
    def elastic_over_plain(self) -> float:
        """1 less what the session, snapshots, journal and hashes cost."""
        return self.elastic / self.plain


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    workers: int
    iterations: int
    assignments: Sequence[str]
    """``section.key=value`` of the job."""

    def config(self) -> Config:
        """The configuration of every worker. Raises `ConfigError`."""
        given = [parse_assignment(text) for text in self.assignments]
        return load(
            command_line=[*given, from_text("node.workers", str(self.workers), "--workers")]
        ).config


def measure(directory: Path, setting: Setting) -> Round:
    """One round. Raises `BenchError` when something ends early or takes too long."""
    return Round(
        env_only=_plain_rate(directory / "env", "env", setting),
        plain=_plain_rate(directory / "plain", "plain", setting),
        elastic=_elastic_rate(directory / "elastic", setting),
    )


def _plain_rate(directory: Path, mode: str, setting: Setting) -> float:
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(to_json(setting.config()))
    log = directory / "ranks.log"
    module = (sys.executable, "-m", "rallypoint.ops.bench.plain", mode, str(directory))
    counts = (str(setting.workers), str(WARM_UP), str(setting.iterations))
    ranks = [processes.start([*module, str(rank), *counts], log) for rank in range(setting.workers)]
    deadline = Deadline(f"the measurement {mode!r}", BOUND_S, log)
    try:
        while any(rank.poll() is None for rank in ranks):
            deadline.check()
            time.sleep(_POLL_S)
    finally:
        for rank in ranks:
            processes.end(rank, 5.0)
    if any(rank.returncode for rank in ranks):
        raise BenchError(f"{mode!r} failed; the end of {log}:\n{processes.tail(log)}")
    written = [directory / f"rank-{rank}.json" for rank in range(setting.workers)]
    return sum_of_rates([json.loads(path.read_text()) for path in written])


def sum_of_rates(ranks: Sequence[Mapping[str, float]]) -> float:
    """Env steps a second of ranks that ran side by side."""
    return sum(rank["env_steps"] / rank["seconds"] for rank in ranks)


def _elastic_rate(directory: Path, setting: Setting) -> float:
    directory.mkdir(parents=True)
    iterations = WARM_UP + setting.iterations
    own = [f"job.iterations={iterations}", "membership.join_debounce_s=60"]  # all from the start
    with Job(directory, setting.workers, [*setting.assignments, *own]) as job:
        job.wait_for_end(BOUND_S)
        job.journal.read()
    return rate_of_journal(job.journal.lines, setting.workers)


def rate_of_journal(lines: Sequence[Mapping[str, Any]], workers: int) -> float:
    """Env steps a second from the end of the warm-up to the last iteration. Raises `BenchError` when
    the job did not train undisturbed with all workers."""
    committed = [line for line in lines if line["event"] == "iteration"][WARM_UP - 1 :]
    if len(committed) < 2 or any(line["world_size"] != workers for line in committed):
        raise BenchError(f"the job did not train with {workers} workers all the time; try again")
    first, last = committed[0], committed[-1]
    seconds: float = last["unix_s"] - first["unix_s"]
    return float((last["env_steps_total"] - first["env_steps_total"]) / seconds)
