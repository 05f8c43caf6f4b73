"""``rallypoint eval``: a checkpoint, seen from outside."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.envs.base import EnvRequest
from rallypoint.trainer.envs.embedded import Outcome
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.envs.pointmass import PointMass
from rallypoint.trainer.errors import StateMismatch, TrainerError
from rallypoint.trainer.evaluate import (
    COMMAND,
    FIRST_ENV_ID,
    ITERATION,
    STEPS,
    evaluate,
    resume_env,
)
from rallypoint.trainer.ppo import PpoLearner
from tests.fakes import toy_simulator
from tests.fakes.checkpoints import save
from tests.fakes.command import run_command
from tests.fakes.training import config, make_worker, train


def run(*arguments: str) -> int:
    return run_command(COMMAND, *arguments)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_from_its_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(task="cartpole", dtype="float32")
    worker = train(settings, [(0,)], 2)[0]
    path = save(tmp_path / "run" / "checkpoints", worker, settings)
    expected = evaluate(worker.learner, make_env(settings, dtype=torch.float32), 16)
    for where in (path, path.parent, path.parent.parent):
        assert run(str(where), "--episodes", "16", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found == msgspec.to_builtins(expected)
    assert list(found) == [
        "task",
        "episodes",
        "steps",
        "return_mean",
        "length_mean",
        "velocity_error_m_s",
        "never_fell",
    ]
    assert found["velocity_error_m_s"] is None
    assert 0.0 <= found["never_fell"] <= 1.0


def test_people_get_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(task="cartpole")
    path = save(tmp_path, make_worker(settings, (0,)), settings)
    assert run(str(path), "--episodes", "2") == 0
    assert "cartpole: 2 episodes" in capsys.readouterr().out


def adaptive(path: Path, reach: float, iteration: int) -> Path:
    """A checkpoint of a job whose episodes start this much further out than at first."""
    settings = config(dtype="float32")
    settings = replace(settings, env=EnvSection(backend=f"{toy_simulator.__name__}:adaptive"))
    worker = make_worker(settings, (0,))
    worker.live()["curriculum/reach"].fill_(reach)
    return save(path, worker, settings, iteration)


def test_episodes_are_of_the_curriculum_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for reach in (0.0, 2.5):  # beyond 2 an episode is over
        path = adaptive(tmp_path / str(reach), reach, iteration=7)
        assert run(str(path), "--episodes", "16", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["length_mean"])
    assert found[0] > 5
    assert found[1] == 1


def test_an_env_is_asked_for_the_iteration_that_would_follow(tmp_path: Path) -> None:
    loaded = load_checkpoint(str(adaptive(tmp_path, 0.5, iteration=7)))
    env = toy_simulator.adaptive(EnvRequest("toy", seed=1))
    assert resume_env(loaded, env) == 8
    assert env.curriculum["reach"].tolist() == [0.5]
    assert resume_env(loaded, PointMass(seed=1, dtype=torch.float32)) == ITERATION


def test_a_damaged_newest_checkpoint_is_skipped_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(task="cartpole")
    worker = make_worker(settings, (0,))
    save(tmp_path, worker, settings, iteration=1)
    newest = save(tmp_path, worker, settings, iteration=2)
    (newest / "state.safetensors").write_bytes(b"nothing")
    assert run(str(tmp_path), "--episodes", "2", "--json") == 0
    assert newest.name in capsys.readouterr().err


def test_no_checkpoint_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        run(str(tmp_path), "--episodes", "2")


def test_a_checkpoint_of_other_nets_does_not_fit(tmp_path: Path) -> None:
    worker = make_worker(config(task="cartpole"), (0,))
    path = save(tmp_path, worker, config(task="cartpole", hidden=(16,)))
    with pytest.raises(StateMismatch, match="model/actor"):
        run(str(path), "--episodes", "2")


def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    worker = make_worker(config(task="cartpole"), (0,))
    path = save(tmp_path, worker, config(task="cartpole", dtype="bfloat"))  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match="does not fit this version"):
        run(str(path), "--episodes", "2")


@pytest.mark.parametrize("episodes", ["0", "-3", "many"])
def test_episodes_must_be_a_positive_number(episodes: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("somewhere", "--episodes", episodes)
    assert exit_.value.code == 2


class Walk(PointMass):
    """Pretends to walk: a reward of 1, an error of 1 m/s before step 100 and 0.25 m/s after, 9 m/s in
    envs that fell; the env with the first id falls at step 5, the next at step 200."""

    falls_at = (5, 200)

    def __init__(self) -> None:
        super().__init__(seed=1, dtype=torch.float64)
        self.t = 0

    def _advance(self, actions: NDArray[np.float64]) -> Outcome:
        self.t += 1
        count = len(self.env_ids)
        falls = np.zeros(count, dtype=bool)
        error = np.full(count, 1.0 if self.t <= 100 else 0.25)
        for env, at in enumerate(self.falls_at[:count]):
            falls[env] = self.t == at
            error[env] = 9.0 if self.t > at else error[env]
        return Outcome(np.ones(count), falls, {"velocity_error_m_s": error})


def walked(env: PointMass, episodes: int) -> dict[str, object]:
    learner = PpoLearner(config(), env.spec, torch.device("cpu"))
    result: dict[str, object] = msgspec.to_builtins(evaluate(learner, env, episodes))
    return result


@pytest.mark.slow
def test_figures_are_over_live_env_steps() -> None:
    env = Walk()
    assert walked(env, 4) == {
        "task": "pointmass",
        "episodes": 4,
        "steps": 5 + 200 + 2 * STEPS,
        "return_mean": (5 + 200 + 2 * STEPS) / 4,
        "length_mean": (5 + 200 + 2 * STEPS) / 4,
        "velocity_error_m_s": 0.25,
        "never_fell": 0.5,
    }
    # Envs that training never uses, and time limits that reset without ending an episode.
    assert env.env_ids.tolist() == list(range(FIRST_ENV_ID, FIRST_ENV_ID + 4))
    assert env.spec.max_episode_steps < STEPS


def test_it_ends_when_nobody_stands() -> None:
    env = Walk()
    result = walked(env, 2)
    assert env.t == 200
    assert (result["never_fell"], result["steps"]) == (0.0, 205)


def test_nobody_lives_long_enough_for_a_velocity_error() -> None:
    assert walked(Walk(), 1)["velocity_error_m_s"] is None


@pytest.mark.slow
def test_a_task_that_follows_motions_is_evaluated_by_clip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(task="humanoid-track", dtype="float32")
    worker = make_worker(settings, (0,))
    path = save(tmp_path, worker, settings)
    assert run(str(path), "--episodes", "24", "--json") == 0
    clips = json.loads(capsys.readouterr().out)["clips"]
    assert worker.env.spec.library is not None
    assert [clip["clip"] for clip in clips] == list(worker.env.spec.library.clips)
    for clip in clips:
        assert clip["episodes"] == 2
        assert 0.0 <= clip["survival"] <= 1.0
        # An untrained policy's mean is next to no action.
        assert clip["rmse_rad"] == pytest.approx(clip["zero_rmse_rad"], abs=0.1)
        assert 0.0 < clip["zero_rmse_rad"] < 0.5
    assert run(str(path), "--episodes", "2") == 0
    assert "march_slow" in capsys.readouterr().out
