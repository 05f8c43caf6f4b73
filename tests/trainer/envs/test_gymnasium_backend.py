"""Vector envs of gymnasium as a backend."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import EnvRequest, StepResult, VecEnv
from rallypoint.trainer.envs.contract import check_env, play
from rallypoint.trainer.envs.rules import RULES
from rallypoint.trainer.errors import EnvError

pytest.importorskip(
    "gymnasium", reason="the extra 'gymnasium' is not installed: pip install rallypoint[gymnasium]"
)
import gymnasium

register: Any = gymnasium.register  # its types know no classes
make = find_backend("gymnasium")
SHORT = {"max_episode_steps": 40}
TASKS: dict[str, dict[str, Any]] = {
    "Ant-v5": SHORT,
    "Humanoid-v5": SHORT,
    "Pendulum-v1": {"vectorization": "async", "max_episode_steps": 15},
}


def build(task: str, count: int = 4, **overrides: object) -> VecEnv:
    request = EnvRequest(task, seed=1, num_envs=count, overrides=overrides)
    env = make(request)
    env.assign(np.arange(count), iteration=1)
    env.begin_rollout(1)
    return env


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_gymnasium_keep_the_contract(task: str, rule: str) -> None:
    request = EnvRequest(task, seed=1, num_envs=4, overrides=TASKS[task])
    assert check_env(make, request, {rule: RULES[rule]}, rebuilds=3) == []


@pytest.mark.parametrize(
    ("task", "obs", "actions", "bound"),
    [("Ant-v5", 105, 8, 1.0), ("Humanoid-v5", 348, 17, 0.4)],
)
@pytest.mark.slow
def test_the_spec_is_that_of_the_task(task: str, obs: int, actions: int, bound: float) -> None:
    spec = build(task).spec
    assert (spec.obs_dims, spec.action_dim) == ({"actor": obs}, actions)
    assert spec.action_bound == pytest.approx(bound)
    assert spec.max_episode_steps == 1000


# --- when gymnasium resets -------------------------------------------------------------------------


class Counter(gymnasium.Env[Any, Any]):
    """Counts its steps; the episode ends at a length that its own seed decides."""

    observation_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.start, self.steps = float(self.np_random.random()), 0
        self.length = int(self.np_random.integers(3, 7))
        return np.array([self.start, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.steps += 1
        observation = np.array([self.start, float(self.steps)])
        return observation, float(self.steps), self.steps >= self.length, False, {}


def native(mode: str) -> Any:
    def make_envs(num_envs: int, max_episode_steps: int) -> Any:
        modes = gymnasium.vector.AutoresetMode
        return gymnasium.vector.SyncVectorEnv(
            [Counter for _ in range(num_envs)], autoreset_mode=modes(mode)
        )

    return make_envs


@pytest.fixture(params=["NextStep", "SameStep", "Disabled"])
def counting(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"Counting{request.param}-v0"
    register(name, Counter, vector_entry_point=native(request.param), max_episode_steps=100)
    yield name
    del gymnasium.registry[name]


def test_every_mode_of_gymnasium_becomes_a_reset_in_the_same_step(counting: str) -> None:
    env = build(counting, vectorization="native")
    steps = [0.0] * 4
    ended = 0
    for result in play(env, 40):
        assert result.final_obs is not None
        for row in range(4):
            steps[row] += 1  # no step is spent on a reset alone
            assert result.reward[row] == steps[row]
            assert result.final_obs["actor"][row, 1] == steps[row]
            if result.terminated[row]:
                assert result.obs["actor"][row, 1] == 0
                assert result.obs["actor"][row, 0] != result.final_obs["actor"][row, 0]
                ended, steps[row] = ended + 1, 0.0
            else:
                assert result.obs["actor"][row, 1] == steps[row]
    assert ended > 15


def test_a_vector_env_that_cannot_reset_some_alone_is_refused_in_words() -> None:
    class Whole(gymnasium.vector.SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    name = "Whole-v0"
    register(
        name,
        Counter,
        vector_entry_point=lambda num_envs, max_episode_steps: Whole([Counter] * num_envs),
        max_episode_steps=100,
    )
    try:
        env = build(name, vectorization="native")
        with pytest.raises(EnvError, match=r"NextStep.*reset_mask.*vectorization=sync"):
            play(env, 10)
    finally:
        del gymnasium.registry[name]


# --- what cannot be trained -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "overrides", "words"),
    [
        ("NoSuch-v7", {}, r"NoSuch.*doesn't exist"),
        ("CartPole-v1", {}, r"actions are Discrete\(2\).*real numbers"),
        ("Pendulum-v1", {"vectorization": "gpu"}, r"'gpu' must be one of sync, async, native"),
        ("Pendulum-v1", {"gravity": 9.8}, r"gravity"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_in_words(
    task: str, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvError, match=words):
        build(task, **overrides)


def test_groups_of_a_dict_of_observations() -> None:
    class Groups(Counter):
        observation_space = gymnasium.spaces.Dict(
            {
                "critic": gymnasium.spaces.Box(-1, 1, (2, 2), np.float32),
                "policy": gymnasium.spaces.Box(-1, 1, (3,), np.float32),
            }
        )

        def reset(self, **options: Any) -> tuple[Any, Any]:
            super().reset(**options)
            return {"critic": np.eye(2, dtype="f4"), "policy": np.ones(3, "f4")}, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
            _, *rest = super().step(action)
            return {"critic": np.eye(2, dtype="f4"), "policy": np.ones(3, "f4")}, *rest

    register("Groups-v0", Groups, max_episode_steps=9, disable_env_checker=True)
    try:
        env = build("Groups-v0", count=2)
        result: StepResult = play(env, 1)[0]
    finally:
        del gymnasium.registry["Groups-v0"]
    assert env.spec.obs_dims == {"critic": 4, "actor": 3}
    assert torch.equal(result.obs["critic"], torch.tensor([[1.0, 0, 0, 1]] * 2))
