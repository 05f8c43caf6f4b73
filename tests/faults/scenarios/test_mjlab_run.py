"""mjlab under the elastic session: two workers train, one is killed, and its successor joins. All envs are
simulated all the time, so the survivor builds its simulation anew twice."""

import importlib.util
from pathlib import Path

import pytest

from tests.faults.injectors.job import FaultJob, by_rank
from tests.faults.model.lines import IterationLine, RecoveryLine, read_journal

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]

ENVS_S = 'recovery_seconds_sum{kind="forced",phase="envs"}'
SETTINGS = (
    *("env.backend=mjlab", "env.task=Mjlab-Cartpole-Balance"),
    *("env.budget=global", "env.num_envs=32", "env.block=8"),
    *("job.profile=rsl_rl", "node.workers=2", "job.iterations=100000"),
    "membership.orphan_grace_s=10.0",
)


class SimulatorJob(FaultJob):
    """Workers take as long to come as their simulator."""

    wait_s = 300.0


@pytest.fixture
def job(tmp_path: Path) -> SimulatorJob:
    """Two workers that train the cart pole."""
    if importlib.util.find_spec("mjlab") is None:
        pytest.skip("mjlab is not installed here: `make test-mjlab` does it")
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    return SimulatorJob(tmp_path / "run", *options, command=("-m", "rallypoint.daemon.cli", "run"))


def test_mjlab_trains_on_while_a_worker_is_killed_and_one_joins(job: SimulatorJob) -> None:
    try:
        before = job.settle(2, 2)
        survivor, victim = by_rank(before, 0), by_rank(before, 1)
        held_s = job.metrics()[ENVS_S]
        job.kill(before, 1)
        after = job.settle(2, 2, newer_than={victim["slot"]: victim["incarnation"]})
        assert after["generation"] >= before["generation"] + 2  # without it, and with its successor
        assert survivor["pid"] in {w["pid"] for w in after["workers"]}
        assert [w["num_envs"] for w in after["workers"]] == [16, 16]
        assert job.metrics()[ENVS_S] > held_s, "the survivor's build for all envs"
        builds = job.page(survivor["slot"]).env_builds
        job.process.terminate()
        job.wait_until(lambda: job.process.poll() is not None, lambda: "the end")
        assert job.process.returncode == 0
    finally:
        job.end_all()
    assert builds >= 3, "for its half, for all, and for its half again"
    lines = read_journal(job.rundir.journal)
    committed = [line.iteration for line in lines if isinstance(line, IterationLine)]
    assert committed == list(range(1, len(committed) + 1))
    changes = [(line.kind, line.cause) for line in lines if isinstance(line, RecoveryLine)]
    assert changes[-2:] == [("forced", "worker_lost"), ("planned", "join")]
