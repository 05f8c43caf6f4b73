"""The contract that every embedded task satisfies."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import EnvRequest, StepResult
from rallypoint.trainer.envs.embedded import EmbeddedEnv
from rallypoint.trainer.envs.factory import EMBEDDED_TASKS, embedded
from rallypoint.trainer.errors import EnvError

TASKS = list(EMBEDDED_TASKS)
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(task: str, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> EmbeddedEnv:
    return embedded(EnvRequest(task, seed, dtype))


def started(task: str, ids: NDArray[np.int64], *, seed: int = 1) -> tuple[EmbeddedEnv, Tensor]:
    env = build(task, seed=seed)
    env.assign(ids, iteration=1)
    return env, env.begin_rollout(1)["actor"]


def actions_for(env: EmbeddedEnv, ids: NDArray[np.int64], step: int) -> Tensor:
    """Actions that are a function of env id and step alone."""
    grid = ids[:, None] * 7.1 + np.arange(env.spec.action_dim) * 1.3 + step * 0.37
    return torch.from_numpy(1.5 * np.sin(grid)).to(torch.float32)


def play(env: EmbeddedEnv, steps: int, *, first: int = 0) -> list[StepResult]:
    return [env.step(actions_for(env, env.env_ids, first + step)) for step in range(steps)]


def assert_same(a: StepResult, b: StepResult, rows_of_a: NDArray[np.int64] | None = None) -> None:
    pick = slice(None) if rows_of_a is None else rows_of_a
    assert torch.equal(a.obs["actor"][pick], b.obs["actor"])
    assert torch.equal(a.reward[pick], b.reward)
    assert torch.equal(a.terminated[pick], b.terminated)
    assert torch.equal(a.truncated[pick], b.truncated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes_follow_the_spec(task: str, dtype: torch.dtype) -> None:
    env = build(task, dtype=dtype)
    spec = env.spec
    assert spec.task == task
    assert spec.capabilities.resize == "exact"
    env.assign(np.arange(6), iteration=1)
    first = env.begin_rollout(1)
    result = env.step(torch.zeros(6, spec.action_dim, dtype=dtype))
    assert result.final_obs is not None
    for groups in (first, result.obs, result.final_obs):
        assert {name: tuple(x.shape) for name, x in groups.items()} == {
            name: (6, dim) for name, dim in spec.obs_dims.items()
        }
        assert all(x.dtype == dtype and x.is_contiguous() for x in groups.values())
    assert (result.reward.shape, result.reward.dtype) == ((6,), dtype)
    for flags in (result.terminated, result.truncated):
        assert (flags.shape, flags.dtype) == ((6,), torch.bool)
    for figure in result.figures.values():
        assert (figure.shape, figure.dtype) == ((6,), torch.float64)


def test_everything_is_finite_and_figure_names_stay(task: str) -> None:
    env, obs = started(task, np.arange(16))
    assert torch.isfinite(obs).all()
    names = set()
    for step in range(40):
        result = env.step(40.0 * actions_for(env, env.env_ids, step))
        names.add(tuple(result.figures))
        for value in (*result.obs.values(), result.reward, *result.figures.values()):
            assert torch.isfinite(value).all()
    assert len(names) == 1
    assert names != {()}


def test_returned_tensors_never_change_later(task: str) -> None:
    env, obs = started(task, np.arange(16))
    results = play(env, 3)
    tensors = [obs]
    for result in results:
        assert result.final_obs is not None
        tensors += [*result.obs.values(), *result.final_obs.values(), *result.figures.values()]
        tensors += [result.reward, result.terminated, result.truncated]
    copies = [tensor.clone() for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    play(env, 25, first=3)
    for tensor in tensors[:5]:
        tensor.zero_()  # and what the caller does to them does not reach the env
    assert all(torch.equal(a, b) for a, b in zip(tensors[5:], copies[5:], strict=True))
    twin, _ = started(task, np.arange(16))
    play(twin, 28)
    assert_same(play(env, 1, first=28)[0], play(twin, 1, first=28)[0])


@pytest.mark.slow
def test_an_ended_episode_starts_anew_in_the_same_step(task: str) -> None:
    env, _ = started(task, np.arange(64))
    seen_terminated = seen_truncated = 0
    for step in range(60):
        before = env.rows()["episode_step"]
        result = env.step(actions_for(env, env.env_ids, step))
        assert result.final_obs is not None
        after = torch.from_numpy(env.rows()["episode_step"])
        ended = result.terminated | result.truncated
        assert not (result.terminated & result.truncated).any()
        assert (after[ended] == 0).all()
        assert torch.equal(after[~ended], torch.from_numpy(before)[~ended] + 1)
        if env.spec.library is None:  # else the time limit is the end of a clip
            at_limit = torch.from_numpy(before) + 1 >= env.spec.max_episode_steps
            assert torch.equal(result.truncated, at_limit & ~result.terminated)
        changed = (result.obs["actor"] != result.final_obs["actor"]).any(dim=1)
        assert torch.equal(changed, ended)
        seen_terminated += int(result.terminated.sum())
        seen_truncated += int(result.truncated.sum())
    assert seen_terminated > 0
    assert seen_truncated > 0


def test_new_envs_start_at_spread_phases(task: str) -> None:
    env, _ = started(task, np.arange(200))
    phases = env.rows()["episode_step"] / env.spec.max_episode_steps
    assert phases.min() >= 0.0
    assert phases.max() < 1.0
    assert abs(phases.mean() - 0.5) < 0.1
    assert (np.histogram(phases, bins=5, range=(0, 1))[0] > 20).all()


def test_a_seed_gives_the_same_run_and_another_seed_another(task: str) -> None:
    ids = np.arange(8)
    (a, first), (b, again), (_, other) = (
        started(task, ids),
        started(task, ids),
        started(task, ids, seed=2),
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for left, right in zip(play(a, 20), play(b, 20), strict=True):
        assert_same(left, right)


def test_draws_are_keyed_by_the_iteration(task: str) -> None:
    ids = np.arange(32)
    (a, _), (b, _) = started(task, ids), started(task, ids)
    assert torch.equal(b.begin_rollout(2)["actor"], a.begin_rollout(1)["actor"])
    same = [
        torch.equal(left.obs["actor"], right.obs["actor"])
        for left, right in zip(play(a, 60), play(b, 60), strict=True)
    ]
    assert not all(same)


def test_the_global_torch_generator_is_left_alone(task: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    play(started(task, np.arange(16))[0], 30)
    assert torch.equal(torch.rand(4), expected)


def test_a_resize_leaves_the_rows_that_stay_bit_exact(task: str) -> None:
    ids = np.arange(24)
    env, _ = started(task, ids)
    control, _ = started(task, ids)
    play(env, 15)
    play(control, 15)
    stay = np.array([1, 2, 3, 9, 17, 22])
    before = control.rows()
    # Down to a few, up with newcomers on both sides and in between, then down to the first ones.
    for owned in (stay, np.concatenate([[40], stay[::-1], [4, 2**31]]), stay):
        env.assign(owned, iteration=2)
        assert np.array_equal(env.env_ids, np.sort(owned))
    for name, values in env.rows().items():
        assert np.array_equal(values, before[name][stay])
    env.begin_rollout(2)
    control.begin_rollout(2)
    for left, right in zip(play(control, 30), play(env, 30), strict=True):
        assert_same(left, right, stay)
    assert env.builds == 1


def test_an_env_that_comes_back_starts_anew(task: str) -> None:
    env, first = started(task, np.arange(8))
    play(env, 10)
    env.assign(np.arange(4), iteration=2)
    env.assign(np.arange(8), iteration=2)
    second = env.begin_rollout(2)["actor"]
    fresh = build(task)
    fresh.assign(np.arange(4, 8), iteration=2)
    assert torch.equal(second[4:], fresh.begin_rollout(2)["actor"])
    assert not torch.equal(second[4:], first[4:])


def test_no_envs_at_all_is_a_state_like_any_other(task: str) -> None:
    env = build(task)
    assert env.env_ids.size == 0
    for ids in (np.arange(0), np.arange(4), np.arange(0)):
        env.assign(ids, iteration=1)
        obs = env.begin_rollout(1)["actor"]
        result = env.step(torch.zeros(ids.size, env.spec.action_dim))
        assert obs.shape == result.obs["actor"].shape == (ids.size, env.spec.obs_dims["actor"])
        assert result.reward.shape == result.terminated.shape == (ids.size,)
    env.load_rows(np.arange(0), env.rows())
    env.close()


def test_rows_go_on_bit_exactly_in_a_fresh_env(task: str) -> None:
    ids = np.array([0, 3, 4, 5, 11, 2**31 + 7])
    env, _ = started(task, ids)
    play(env, 20)
    moved = build(task)
    moved.assign(np.append(ids[[1, 4, 5]], 1000), iteration=2)
    taken = {name: values[[5, 1, 4]] for name, values in env.rows().items()}
    moved.load_rows(ids[[5, 1, 4]], taken)  # in any order
    here, there = env.begin_rollout(2)["actor"], moved.begin_rollout(2)["actor"]
    order = [0, 1, 3]  # 1000 sorts before the last id
    assert torch.equal(here[[1, 4, 5]], there[order])
    for left, right in zip(play(env, 30), play(moved, 30), strict=True):
        assert torch.equal(left.obs["actor"][[1, 4, 5]], right.obs["actor"][order])
        assert torch.equal(left.reward[[1, 4, 5]], right.reward[order])
        assert torch.equal(left.terminated[[1, 4, 5]], right.terminated[order])


def test_rows_are_copies(task: str) -> None:
    env, obs = started(task, np.arange(4))
    for values in env.rows().values():
        values[:] = 0.0
    assert torch.equal(env.begin_rollout(1)["actor"], obs)


def test_wrong_calls_are_refused_with_the_values(task: str) -> None:
    env = build(task)
    with pytest.raises(EnvError, match=r"\[3\].*twice"):
        env.assign(np.array([3, 1, 3]), iteration=1)
    env.assign(np.arange(4), iteration=1)
    with pytest.raises(EnvError, match="begin_rollout"):
        env.step(torch.zeros(4, env.spec.action_dim))
    env.begin_rollout(1)
    with pytest.raises(EnvError, match=r"\(3, 5\), expected \(4, "):
        env.step(torch.zeros(3, 5))
    actions = torch.zeros(4, env.spec.action_dim)
    actions[2, 0] = torch.nan
    with pytest.raises(EnvError, match=r"envs \[2\] are not finite"):
        env.step(actions)
    rows = env.rows()
    with pytest.raises(EnvError, match=r"\[7\].*not owned"):
        env.load_rows(np.array([0, 1, 2, 7]), rows)
    with pytest.raises(EnvError, match="do not fit"):
        env.load_rows(np.arange(3), rows)
    with pytest.raises(EnvError, match="do not fit"):
        env.load_rows(np.arange(4), {"episode_step": rows["episode_step"]})


@pytest.mark.parametrize("name", ["cartpole", "quadruped-velocity"])
def test_a_diverged_simulation_is_a_terminated_episode(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning to a file in the working directory
    env, _ = started(name, np.arange(4))
    control, _ = started(name, np.arange(4))
    play(env, 3)
    play(control, 3)
    rows = env.rows()
    rows["physics"][1, 2] = 1e30  # a position that no simulation goes on from
    env.load_rows(env.env_ids, rows)
    result, expected = play(env, 1, first=3)[0], play(control, 1, first=3)[0]
    assert result.terminated.tolist() == [False, True, False, False]
    for value in (result.obs["actor"], result.reward, *result.figures.values()):
        assert torch.isfinite(value).all()
    others = torch.tensor([0, 2, 3])
    assert torch.equal(result.obs["actor"][others], expected.obs["actor"][others])
