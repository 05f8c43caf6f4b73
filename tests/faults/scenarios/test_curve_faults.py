"""The curves of a job that loses its rank 0, its supervisor, and is resumed: real workers."""

import signal
from pathlib import Path

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from tests.fakes.tfevents import points
from tests.faults.injectors.job import PACED_RUN, WAIT_S, FaultJob, has_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def test_every_iteration_is_one_point(tmp_path: Path) -> None:
    """Adopted once, and resumed once from a checkpoint that is older than the newest iteration."""
    directory = tmp_path / "run"
    patient = ("--set", "membership.orphan_grace_s=60.0")
    lives, checkpoints = [], directory / "checkpoints"
    try:
        job = FaultJob(directory, "--workers", "2", *patient, command=PACED_RUN)
        lives.append(job)
        job.kill(job.settle(2), 0)
        job.settle(2)
        assert job.end(signal.SIGKILL) == -signal.SIGKILL

        newest = at = 0
        while at == newest:  # until an iteration is behind the newest checkpoint
            job = FaultJob(directory, "--workers", "2", *patient, command=PACED_RUN)
            lives.append(job)
            job.settle(2)
            job.wait_for(has_checkpoint, "a checkpoint")
            job.settle(2)
            for life in lives:  # workers too: what came after the checkpoint is trained again
                life.end_all()
            at = max(info.iteration for info in CheckpointStore(str(checkpoints)).list())
            newest = [x["iteration"] for x in job.journal() if x["event"] == "iteration"][-1]
        iterations = newest + 20

        end = ("--iterations", str(iterations))
        job = FaultJob(directory, "--workers", "2", *end, command=PACED_RUN)
        lives.append(job)
        assert job.process.wait(WAIT_S) == 0
    finally:
        for life in lives:
            life.end_all()

    journal = job.journal()
    numbers = [line["iteration"] for line in journal if line["event"] == "iteration"]
    assert len(numbers) > len(set(numbers)), "nothing was wound back: the case tests nothing"
    found = points(job.rundir.curves)
    assert [step for step, _ in found] == list(range(1, iterations + 1))
    last = {line["iteration"]: line for line in journal if line["event"] == "iteration"}
    for step, values in found:
        assert values["generation"] == last[step]["generation"]
        assert values["tot_timesteps"] == last[step]["env_steps_total"]
        assert values["loss/policy_avg"] == pytest.approx(last[step]["metrics"]["policy_loss"])
        assert values["fps"] > 0
    total_s = [values["tot_time"] for _, values in found]
    assert total_s == sorted(total_s)
