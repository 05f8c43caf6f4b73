"""Steps that cases share: lose a worker at a point, and look at what has become of the run."""

from collections.abc import Collection
from typing import Any

from tests.fakes.supervised import Status
from tests.faults.injectors.job import FaultJob, by_rank
from tests.faults.model.lines import IterationLine, read_journal
from tests.faults.validate.history import violations


def lose_at(job: FaultJob, status: Status, point: str, rank: int) -> dict[str, Any]:
    """Arm one point for one rank, and wait until exactly that worker was killed there."""
    victim = by_rank(status, rank)
    job.arming.arm(f"{point}:{rank}=kill")
    (fired,) = job.wait_fired()
    assert fired.pid == victim["pid"], f"{fired} is not {victim}"
    assert_killed(job, victim)
    return victim


def assert_killed(job: FaultJob, victim: dict[str, Any]) -> None:
    """The supervisor saw this worker end by SIGKILL, not by its own hand."""
    key = f"{victim['node']}/{victim['slot']}#{victim['incarnation']}"
    line = job.wait_logged("worker_exited", worker=key)
    assert line["reason"] == "killed by SIGKILL"
    assert line["pid"] == victim["pid"]


def assert_in_place(
    job: FaultJob, before: Status, after: Status, *, lost: Collection[int], lives: int = 1
) -> None:
    """Survivors kept their process and their env; each lost rank of ``before`` lives again by itself,
    after ``lives`` restarts."""
    for worker in before["workers"]:
        now = next(w for w in after["workers"] if w["slot"] == worker["slot"])
        if worker["rank"] in lost:
            assert now["pid"] != worker["pid"]
            assert now["incarnation"] == worker["incarnation"] + lives
        else:
            assert now["pid"] == worker["pid"]
            assert now["incarnation"] == worker["incarnation"]
        assert job.page(worker["slot"]).env_builds == 1, "built once, in warm-up"
    assert after["iteration"] > before["iteration"]
    assert {fired.entry for fired in job.arming.fired()} != set()


def assert_sound(job: FaultJob) -> None:
    """Every promise holds over the whole history of the job so far, and the policy still learns."""
    history = job.history()
    assert violations(history) == []
    lines = [x for x in read_journal(job.rundir.journal) if isinstance(x, IterationLine)]
    assert len({line.metrics["policy_loss"] for line in lines[-3:]}) == 3, "the loss stands still"
    assert not job.logged("state_hash_conflict")
    assert not job.logged("iteration_gap")
    assert not job.logged("iteration_went_back")
