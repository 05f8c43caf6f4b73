"""What an earlier supervisor of this directory left running, and which of it can be taken over.

Taken over is a job that trains: its newest formed plan is known, and at least one of its members
lives. Then every worker of the newest life of its slot stays, and those of them that have died
meanwhile are reported as losses. Everything else is ended before any worker is started.
"""

from dataclasses import dataclass

import structlog

from rallypoint.daemon.executors import processes, proctable
from rallypoint.daemon.executors.persist import PersistedState, formed_plan
from rallypoint.daemon.executors.processes import WorkerProcess
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Heritage:
    """Workers of the supervisor before, by what becomes of them."""

    adopted: tuple[WorkerProcess, ...]
    """Taken over, dead ones included."""
    ended: tuple[WorkerProcess, ...]
    """Lived and were ended."""


def take_over(rundir: RunDir, state: PersistedState, config: Config) -> Heritage:
    """End what cannot be taken over; blocks until it is gone.

    Raises `TimeoutError` when a process does not end, and `ConfigError` for a damaged list.
    """
    earlier = processes.read_earlier(rundir)
    adopted = [p for p in earlier if _is_newest_life(p, rundir, state, config)]
    living = {p.key for p in adopted if proctable.lives(p.pid, p.start_ticks)}
    refusal = _refusal(state, living)
    if refusal:
        if living:
            _log.warning("workers_not_adopted", reason=refusal)
        return Heritage((), tuple(processes.end_earlier(rundir)))
    others = [p for p in earlier if p not in adopted]
    ended = [p for p in others if processes.end(p)]
    return Heritage(tuple(adopted), tuple(ended))


def _is_newest_life(
    process: WorkerProcess, rundir: RunDir, state: PersistedState, config: Config
) -> bool:
    key = process.key
    return (
        key.node == config.node.name
        and key.slot < config.node.workers
        and state.slot_incarnations.get(key.slot) == key.incarnation
        and rundir.page(key.slot).exists()
    )


def _refusal(state: PersistedState, living: set[WorkerKey]) -> str:
    """Why the job cannot be taken over; "" when it can."""
    formed = formed_plan(state)
    if state.job.state not in ("running", "paused"):
        return f"the job was {state.job.state}"
    if formed is None:
        return "no formed plan is known"
    if not any(member.key in living for member in formed.members):
        return f"no member of generation {formed.generation}, the newest formed, lives"
    return ""
