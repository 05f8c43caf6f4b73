"""Other simulators than the embedded one under the elastic session: losses, joins, capacity, slow builds."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.commands.client import AdminClient
from tests.fakes.supervised import Status, trains
from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import (
    assert_killed,
    assert_sound,
    kill,
    let_in,
    lose_at,
    lose_last,
    next_life,
    recover,
)
from tests.faults.injectors.exact import state_of
from tests.faults.injectors.job import FaultJob, by_rank

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NETS = ("--set", "ppo.critic_hidden=[16,16]", "--set", "ppo.learning_rate=0.001")
"""No task's overrides stand in front of the profile's large ones."""
SIMULATOR = (*NETS, "--set", "env.backend=tests.fakes.toy_simulator:make")
TOY = (*SIMULATOR, "--workers", "2")
GLOBAL = ("--set", "env.budget=global", "--set", "env.num_envs=48")


@pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None,
    reason="the extra 'gymnasium' is not installed: pip install rallypoint[gymnasium]",
)
def test_two_ranks_train_a_task_of_gymnasium_through_a_kill(jobs: Jobs) -> None:
    options = (
        *NETS,
        "--set",
        "env.backend=gymnasium",
        "--set",
        "env.task=Ant-v5",
        "--workers",
        "2",
    )
    with jobs.case(*options, "--set", 'env.overrides=["max_episode_steps=40"]') as job:
        before = job.settle(2)
        victim = lose_at(job, before, "rollout", 1)
        recover(job, before, [victim])
        assert_sound(job, before)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """No simulator is built while this file is there."""
    path = tmp_path / "gate"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def gated(tmp_path: Path, gate: Path) -> Iterator[FaultJob]:
    job = FaultJob(tmp_path / "run", *TOY, "--set", f'env.overrides=["gate={gate}"]')
    try:
        yield job
        assert job.end() == 0
    finally:
        gate.unlink(missing_ok=True)
        job.end_all()


def commits(job: FaultJob, status: Status, more: int, workers: int) -> Status:
    """So many more iterations, of so many workers, in the same generation."""
    return job.wait_for(
        lambda s: trains(s, workers) and s["iteration"] >= status["iteration"] + more,
        f"{more} more iterations of {workers} workers",
    )


def shown(job: FaultJob) -> str:
    """What ``rallypoint status`` prints."""
    command = [sys.executable, "-m", "rallypoint.daemon.cli", "status", "--dir"]
    path = str(job.rundir.path)
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_survivors_train_on_while_a_newcomer_builds_and_its_join_builds_nothing(
    gated: FaultJob, gate: Path
) -> None:
    before = gated.settle(2)
    gate.touch()
    (victim,) = kill(gated, before, 1)
    newcomer = next_life(gated, victim)
    alone = gated.wait_for(lambda s: trains(s, 1), "the survivor to train on")
    commits(gated, alone, 20, workers=1)
    assert gated.page(victim.life.slot).env_builds == 0, "it is still building"
    building = f"local/{victim.life.slot}: building the toy"
    assert building in shown(gated)
    gate.unlink()
    after = gated.settle(2, newer_than={victim.life.slot: victim.life.incarnation})
    assert by_rank(after, 1)["pid"] == newcomer.pid
    assert [gated.page(slot).env_builds for slot in (0, 1)] == [1, 1]
    assert "building the toy" not in shown(gated)
    assert_sound(gated, before)


def test_a_spare_keeps_its_simulator_warm(tmp_path: Path, gate: Path) -> None:
    job = FaultJob(
        tmp_path / "run",
        *(*SIMULATOR, "--workers", "3"),
        *("--set", "job.spares=1", "--set", f'env.overrides=["gate={gate}"]'),
    )
    try:
        before = job.wait_for(
            lambda s: trains(s, 2) and sum(w["state"] == "ready" for w in s["workers"]) == 1,
            "two to train and one spare",
        )
        before = commits(job, before, 2, workers=2)
        gate.touch()  # nothing can be built from now on
        (victim,) = kill(job, before, 1)
        after = job.wait_for(
            lambda s: trains(s, 2) and s["generation"] > before["generation"], "the spare to enter"
        )
        commits(job, after, 5, workers=2)
        assert job.page(victim.life.slot).env_builds == 0
        assert_killed(job, victim)
        gate.unlink()
        assert job.end() == 0
    finally:
        gate.unlink(missing_ok=True)
        job.end_all()


def envs_held(job: FaultJob) -> tuple[float, float]:
    """How often envs were held anew because of losses, and the seconds that it took."""
    name = 'recovery_seconds_{}{{kind="forced",phase="envs"}}'.format
    metrics = job.metrics()
    return metrics[name("count")], metrics[name("sum")]


def test_survivors_train_on_while_they_build_for_another_share(tmp_path: Path, gate: Path) -> None:
    job = FaultJob(tmp_path / "run", *TOY, *GLOBAL, "--set", f'env.overrides=["gate={gate}"]')
    try:
        before = job.settle(2)
        count, seconds = envs_held(job)
        victim, newcomer, alone = lose_last(job, before)  # the survivor has built for all 48
        held = envs_held(job)
        assert (held[0], held[1] > seconds) == (count + 1, True)
        survivor = by_rank(alone, 0)["slot"]
        builds = job.page(survivor).env_builds
        gate.touch()
        let_in(newcomer)
        published = alone["generation"] + 1
        job.wait_logged("generation_published", published=published)
        now = job.status()
        assert commits(job, now, 10, workers=1)["generation"] == alone["generation"]
        gate.unlink()
        job.settle(2, newer_than={victim.life.slot: victim.life.incarnation})
        assert job.page(survivor).env_builds == builds + 1
        assert_sound(job, before)
        assert job.end() == 0
    finally:
        gate.unlink(missing_ok=True)
        job.end_all()


def test_memory_that_runs_out_in_a_build_caps_the_budget_and_the_job_goes_on(jobs: Jobs) -> None:
    with jobs.case(*TOY, *GLOBAL, "--set", 'env.overrides=["memory_envs=30"]') as job:
        before = job.settle(2)
        assert job.metrics()['envs{scope="deficit"}'] == 0
        victim, newcomer, alone = lose_last(job, before)
        survivor = by_rank(alone, 0)  # the same process: it has tried 48, and holds 24
        assert (survivor["pid"], survivor["num_envs"]) == (by_rank(before, 0)["pid"], 24)
        assert job.metrics()['envs{scope="deficit"}'] == 24
        let_in(newcomer)
        job.settle(2, newer_than={victim.life.slot: victim.life.incarnation})
        assert job.metrics()['envs{scope="deficit"}'] == 0
        assert_sound(job, before)


def test_a_curriculum_is_the_same_on_all_ranks_and_outlives_a_kill(jobs: Jobs) -> None:
    backend = ("--set", "env.backend=tests.fakes.toy_simulator:adaptive", "--workers", "2")
    with jobs.case(*NETS, *backend) as job:
        before = job.settle(2, iterations=6)
        victim = lose_at(job, before, "mini_batch", 0)
        after = recover(job, before, [victim])
        job.wait_for(
            lambda s: (s["checkpoint"]["iteration"] or 0) > after["iteration"],
            "a checkpoint after it",
        )
        assert_sound(job, before)  # no hash differed: the curriculum is in each
        state = state_of(job.rundir.path / "checkpoints")
        assert state["curriculum/reach"].item() > 0.01


def test_workers_that_only_a_new_process_makes_larger_start_again_one_by_one(
    tmp_path: Path,
) -> None:
    backend = ("--set", "env.backend=tests.fakes.toy_simulator:restarted", "--workers", "3")
    job = FaultJob(tmp_path / "run", *NETS, *backend, *GLOBAL)
    try:
        before = job.settle(3)
        assert {w["num_envs"] for w in before["workers"]} == {16}
        with AdminClient(job.rundir.path) as client:
            client.ask(command="scale", workers=2)
        short = job.wait_for(lambda s: trains(s, 2) and s["num_envs"] == 32, "a deficit")
        whole = job.wait_for(lambda s: trains(s, 2) and s["num_envs"] == 48, "all 48 envs")
        assert whole["iteration"] > short["iteration"]
        assert job.metrics()['worker_restarts_total{reason="cold"}'] >= 2
        assert job.status()["state"] == "running"
        assert job.end() == 0
    finally:
        job.end_all()
