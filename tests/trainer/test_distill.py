"""Distillation: exact over ranks, and a student that comes near its teacher."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import Config, DistillSection
from rallypoint.daemon.shared.configload import load, parse_assignment
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.evaluate import configuration, evaluate, restore_learner
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.rng import policy_noise
from tests.fakes.checkpoints import save
from tests.fakes.training import config, make_worker, train
from tests.faults.injectors.job import FaultJob

CLI = ("-m", "rallypoint.daemon.cli", "run")
STEPS, SEED = 100, 7


@pytest.fixture(name="teacher", scope="module")
def trained_teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a policy that has learned a little of pointmass."""
    settings = config(dtype="float32")
    worker = train(settings, [range(2)], 12)[0]
    return str(save(tmp_path_factory.mktemp("teacher"), worker, settings))


def student(teacher: str, **distill: float) -> Config:
    """A float64 student with other start values than the teacher's."""
    base = config(learning_rate=1e-3)
    section = DistillSection(teacher=teacher, **distill)  # type: ignore[arg-type]
    return replace(base, job=replace(base.job, seed=SEED), distill=section)


def returns(learner: PpoLearner, settings: Config) -> float:
    env = make_env(settings, dtype=torch.float32)
    return evaluate(learner, env, 32, steps=STEPS).return_mean


@pytest.mark.parametrize(
    "mixture", [{}, {"beta": 0.5}, {"ppo_coef": 0.5}], ids=["pure", "mixed actions", "with PPO"]
)
def test_uneven_and_empty_ranks_equal_one_process(teacher: str, mixture: dict[str, float]) -> None:
    settings = student(teacher, **mixture)
    union = train(settings, [range(3)], 3)[0]
    for shards in [((0,), (1, 2)), ((0, 1, 2), ())]:
        for worker in train(settings, shards, 3):
            for name, expected in union.live().items():
                torch.testing.assert_close(
                    worker.live()[name], expected, rtol=0, atol=1e-10, check_dtype=True
                )
            assert worker.history[-1]["aux_distill"] == pytest.approx(
                union.history[-1]["aux_distill"], rel=1e-9
            )


def test_the_distance_to_the_teacher_shrinks(teacher: str) -> None:
    history = train(student(teacher), [range(2)], 10)[0].history
    assert history[-1]["aux_distill"] < 0.2 * history[0]["aux_distill"]
    assert "policy_loss" not in history[0]
    assert "kl" in history[0]
    with_ppo = train(student(teacher, ppo_coef=1.0), [range(2)], 1)[0].history
    assert "policy_loss" in with_ppo[0]


def test_the_teacher_stays_and_is_part_of_the_state(teacher: str) -> None:
    settings = student(teacher)
    before = make_worker(settings, (0,)).live()
    after = train(settings, [(0,)], 2)[0].live()
    names = [name for name in before if name.startswith("teacher/")]
    assert "teacher/normaliser/actor/mean" in names
    loaded = load_checkpoint(teacher).tensors
    for name in names:
        assert torch.equal(after[name], before[name]), name
        assert torch.equal(after[name], loaded[name.removeprefix("teacher/")]), name


def test_the_teacher_acts_in_its_share_of_the_envs_and_less_and_less(teacher: str) -> None:
    def shares(**distill: float) -> list[float]:
        worker = make_worker(student(teacher, **distill), range(8))
        found = []
        for iteration in (1, 3, 5):
            rollout = worker.collect(iteration)
            assert rollout.labels is not None
            steps, envs, size = rollout.actions.shape
            ids = np.arange(envs)
            noise = policy_noise(SEED, ids, iteration, steps, size, torch.float64)
            by = [
                (rollout.actions - m - rollout.std * noise).abs().amax((0, 2)) < 1e-9
                for m in (rollout.labels, rollout.mean)
            ]
            assert torch.equal(by[0], ~by[1])
            found.append(by[0].double().mean().item())
        return found

    assert shares() == [0.0, 0.0, 0.0]
    assert shares(beta=1.0) == [1.0, 1.0, 1.0]
    assert shares(beta=0.5) == pytest.approx([0.5] * 3, abs=0.2)
    assert shares(beta=1.0, beta_iterations=4) == pytest.approx([1.0, 0.5, 0.0], abs=0.2)


def test_a_teacher_of_another_task_is_refused(tmp_path: Path) -> None:
    other = config(task="cartpole")
    path = save(tmp_path, make_worker(other, (0,)), other)
    with pytest.raises(TrainerError, match=r"'cartpole'.*'pointmass'"):
        make_worker(student(str(path)), (0,))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["distill.beta=1.5"], "share"),
        (["distill.beta=0.5", "distill.ppo_coef=1.0"], "the teacher act"),
        (["distill.beta_iterations=0"], "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(command_line=[parse_assignment(text) for text in settings])


@pytest.mark.slow
@pytest.mark.faults
def test_a_student_comes_near_its_teacher_through_the_loss_of_a_worker(tmp_path: Path) -> None:
    """Both trained by real jobs: the second loses its rank 0, and gets another."""

    def job(name: str, iterations: int, *options: str, lose: bool = False) -> Path:
        directory = tmp_path / name
        bounds = ("--workers", "2", "--iterations", str(iterations))
        sizes = ("--set", "env.num_envs=32", "--set", "ppo.rollout_steps=24")
        run = FaultJob(directory, *bounds, *sizes, *options, command=CLI)
        try:
            if lose:
                run.kill(run.settle(2), 0)
            assert run.process.wait(90) == 0
            assert bool([g for g in run.journal() if g.get("cause") == "worker_lost"]) == lose
        finally:
            run.end_all()
        return directory

    teacher = job("teacher", 60)
    other = ("--set", "job.seed=9", "--set", f"distill.teacher={teacher}")
    distilled = job("student", 60, *other, "--set", "ppo.desired_kl=none", lose=True)

    base = config(dtype="float32")
    untrained = returns(make_worker(base, ()).learner, base)
    goal, found = _return_of(str(teacher)), _return_of(str(distilled))
    assert goal > untrained + 0.1, "the teacher has learned nothing: the case tests nothing"
    assert found >= goal - 0.1 * (goal - untrained), (untrained, goal, found)


def _return_of(path: str) -> float:
    loaded = load_checkpoint(path)
    settings = configuration(loaded)
    env = make_env(settings, dtype=torch.float32)
    return returns(restore_learner(loaded, settings, env.spec), settings)
