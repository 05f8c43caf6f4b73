"""Curricula and domain randomisation are training state: they go through the state registry."""

import numpy as np
import torch

from rallypoint.trainer.elastic.envrows import register_curriculum, register_env
from rallypoint.trainer.elastic.registry import PackedState, Scope, StateRegistry
from rallypoint.trainer.envs.base import EnvRequest
from rallypoint.trainer.envs.simulator import RebuiltEnv
from tests.fakes.toy_simulator import adaptive, make

ENDED = {"episode_return_mean": 1.0}


def worker(iterations: int = 0) -> tuple[RebuiltEnv, StateRegistry]:
    """An env whose job has made some iterations, and the registry of its worker."""
    env = adaptive(EnvRequest("toy", seed=1))
    registry = StateRegistry()
    register_env(registry, env)
    for _ in range(iterations):
        env.advance(ENDED)
    env.assign(np.arange(8), iteration=1 + iterations)
    return env, registry


def test_a_curriculum_is_global_state_that_is_written_in_place() -> None:
    env, registry = worker()
    live = registry.shared()["curriculum/reach"]
    assert registry.scope_of("curriculum/reach") is Scope.GLOBAL
    env.advance(ENDED)
    env.advance({})
    assert live.tolist() == [0.01]
    assert (env.rows()["start"] == 0).all(), "episodes that run go on"


def test_an_env_without_a_curriculum_registers_none() -> None:
    registry = StateRegistry()
    register_curriculum(registry, make(EnvRequest("toy", seed=1)))
    assert registry.shared() == {}


def test_a_simulator_that_is_built_anew_goes_on_with_the_curriculum() -> None:
    env, _ = worker(iterations=30)
    env.assign(np.arange(16), iteration=40)
    assert env.builds == 2
    assert np.allclose(np.abs(env.rows()["start"]), 0.3)


def test_a_newcomer_starts_episodes_with_the_curriculum_that_it_receives() -> None:
    _, old = worker(iterations=50)
    env, registry = worker()
    received = PackedState(old.shared())
    received.fill_from(old.shared())
    received.load_into(registry.shared())
    env.assign(np.arange(100, 108), iteration=51)
    assert np.allclose(np.abs(env.rows()["start"]), 0.5)


def test_what_an_env_was_randomised_to_moves_with_its_rows() -> None:
    _, old = worker(iterations=20)
    env, registry = worker()
    rows = old.read_rows()
    assert set(rows) == {"env/state", "env/start"}
    registry.write_rows(np.arange(8), rows)
    assert torch.equal(torch.from_numpy(env.rows()["start"]), rows["env/start"])
    assert np.allclose(np.abs(env.rows()["start"]), 0.2)
