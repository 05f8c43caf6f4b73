"""Steps that cases share: lose a worker at a point, and look at what has become of the run."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.shared import timeouts
from rallypoint.daemon.shared.configload import from_json
from tests.fakes.supervised import Status, trains
from tests.faults.injectors.job import FaultJob, by_rank
from tests.faults.model.lines import IterationLine, Life, RecoveryLine, read_journal
from tests.faults.validate.history import violations


@dataclass(frozen=True)
class Victim:
    """A worker that a case kills."""

    life: Life
    pid: int

    @classmethod
    def of(cls, worker: dict[str, Any]) -> Self:
        """The worker of a line of ``status``."""
        return cls(Life(worker["slot"], worker["incarnation"]), worker["pid"])


def lose_at(job: FaultJob, status: Status, point: str, rank: int) -> Victim:
    """Arm one point for one rank, and wait until exactly that worker was killed there."""
    victim = Victim.of(by_rank(status, rank))
    job.arming.arm(f"{point}:{rank}=kill")
    assert_fired(job, victim)
    return victim


def kill(job: FaultJob, status: Status, *ranks: int) -> list[Victim]:
    """SIGKILL to the workers of these ranks, from outside."""
    return [Victim.of(worker) for worker in job.kill(status, *ranks)]


def lose_last(job: FaultJob, status: Status) -> tuple[Victim, Victim, Status]:
    """Kill the last rank, and wait until the others are past their first iteration without it, and its
    next life is warm. That one is stopped before it says so, until `let_in`: it will enter as the last
    rank by a planned change. Who was killed, the newcomer, and the status."""
    rest = len(status["workers"]) - 1
    job.arming.arm(f"ready:{by_rank(status, rest)['slot']}=stop")
    (victim,) = kill(job, status, rest)
    (fired,) = job.wait_fired()
    newcomer = next_life(job, victim)
    assert fired.pid == newcomer.pid
    job.wait_until(lambda: stopped(newcomer.pid), lambda: f"{newcomer} to be stopped")
    reached = job.wait_for(
        lambda s: trains(s, rest) and s["generation"] > status["generation"], f"{rest} to train on"
    )
    there = job.wait_for(
        lambda s: trains(s, rest) and s["iteration"] >= reached["iteration"] + 2,
        f"{rest} to commit their first iterations",
    )
    return victim, newcomer, there


def let_in(newcomer: Victim) -> None:
    """A newcomer that `lose_last` has stopped says that it is ready."""
    os.kill(newcomer.pid, signal.SIGCONT)


def stopped(pid: int) -> bool:
    """Whether this process is stopped by a signal."""
    entry = proctable.read(pid)
    return entry is not None and entry.state == "T"


def next_life(job: FaultJob, victim: Victim) -> Victim:
    """The worker that follows in the slot of a lost one."""
    life = Life(victim.life.slot, victim.life.incarnation + 1)
    return Victim(life, job.wait_logged("worker_started", worker=_name(job, life))["pid"])


def assert_fired(job: FaultJob, victim: Victim) -> None:
    """The armed point fires once, in this process, and the supervisor sees it end by that."""
    (fired,) = job.wait_fired()
    assert fired.pid == victim.pid, f"{fired}, not in {victim}"
    assert_killed(job, victim)


def assert_killed(job: FaultJob, *victims: Victim) -> None:
    """The supervisor saw these workers end by SIGKILL, not by their own hand."""
    for victim in victims:
        line = job.wait_logged("worker_exited", worker=_name(job, victim.life))
        assert (line["pid"], line["reason"]) == (victim.pid, "killed by SIGKILL")


def recover(job: FaultJob, before: Status, victims: Sequence[Victim]) -> Status:
    """Wait until all train again and the lost workers are back by themselves, once more for each
    life lost. Survivors kept their process, their env, and their life."""
    lost = {victim.life.slot: victim.life.incarnation for victim in victims}
    after = job.settle(len(before["workers"]), newer_than=lost)
    for worker in before["workers"]:
        slot, now = worker["slot"], after["workers"][worker["slot"]]
        if slot in lost:
            assert now["incarnation"] == lost[slot] + 1, "back after one restart"
            assert now["pid"] != worker["pid"]
        else:
            assert now["incarnation"] == worker["incarnation"]
            assert now["pid"] == worker["pid"]
        assert job.page(slot).env_builds == 1, "built once, in warm-up"
    assert after["iteration"] > before["iteration"]
    return after


def assert_sound(
    job: FaultJob, before: Status, *, init_broken: bool = False, joined: bool = True
) -> None:
    """Every promise holds over the whole history of the job so far, the policy still learns, and the
    changes since ``before`` kept to the derived deadlines; newcomers have ``joined`` a generation that
    trained."""
    wrong = violations(job.history())
    assert not wrong, "\n".join(wrong[:20])
    lines = read_journal(job.rundir.journal)
    losses = [x.metrics["policy_loss"] for x in lines if isinstance(x, IterationLine)]
    assert len(set(losses[-3:])) == 3, "the loss stands still"
    for event in ("state_hash_conflict", "iteration_gap", "iteration_went_back"):
        assert not job.logged(event)
    config = from_json(job.rundir.config.read_bytes())
    times = timeouts.derive(config, config.node.workers)
    changes = [
        line
        for line in lines
        if isinstance(line, RecoveryLine) and line.generation > before["generation"]
    ]
    kinds = {"forced", "planned"} if joined else {"forced"}
    assert kinds <= {change.kind for change in changes}
    for change in changes:
        assert None not in change.seconds.values(), f"an unknown phase: {change}"
    for change in changes:
        if change.kind == "forced":  # in a planned one, newcomers wait for the next safe point
            assert (change.seconds["group"] or 0.0) < times.group_init_s, change
            if init_broken:
                assert (change.seconds["total"] or 0.0) < times.rebuild_bound_s, change


def _name(job: FaultJob, life: Life) -> str:
    return f"{job.node}/{life.slot}#{life.incarnation}"
