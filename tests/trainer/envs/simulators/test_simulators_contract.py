"""The contract of envs on simulators of fixed size: Isaac Lab, mjlab, and a stub of Isaac Lab with and
without Kit. A simulator that is not installed is skipped, with what would install it."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import EnvRequest, StepResult, VecEnv
from rallypoint.trainer.errors import EnvCapacityError, EnvError
from tests.fakes import isaaclab_stub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the simulators
]

CASES = {
    "stub": isaaclab_stub.TASK,
    "stub with Kit": isaaclab_stub.TASK,
    "isaaclab direct": "Isaac-Cartpole-Direct",
    "isaaclab manager": "Isaac-Cartpole",
    "mjlab": "Mjlab-Cartpole-Balance",
}

Make = Callable[..., VecEnv]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name.startswith("stub"):
        isaaclab_stub.install(monkeypatch, kit="Kit" in name)
    else:
        request.getfixturevalue("need")(name.split()[0])
        if name.startswith("isaaclab"):
            request.getfixturevalue("assets")
    return name


@pytest.fixture
def make(case: str) -> Iterator[Make]:
    """Builds envs of the case, one after the other; closes the last one."""
    made: list[VecEnv] = []

    def build(count: int = 32, **fields: Any) -> VecEnv:
        for env in made:
            env.close()
        if case == "stub with Kit":
            isaaclab_stub.install(pytest.MonkeyPatch(), kit=True)  # as a new process would be
        backend = case.split()[0].replace("stub", "isaaclab")
        request = replace(EnvRequest(CASES[case], seed=1, num_envs=count), **fields)
        made[:] = [find_backend(backend)(request)]
        return made[0]

    yield build
    for env in made:
        env.close()


def started(env: VecEnv, count: int = 32) -> dict[str, Tensor]:
    env.assign(np.arange(count), iteration=1)
    return env.begin_rollout(1)


def play(env: VecEnv, steps: int) -> list[StepResult]:
    ids = torch.from_numpy(env.env_ids).double()[:, None]
    grid = ids * 7.1 + torch.arange(env.spec.action_dim) * 1.3
    return [env.step(torch.sin(grid + 0.37 * k).float()) for k in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shapes_and_dtypes_follow_the_spec(make: Make, case: str, dtype: torch.dtype) -> None:
    env = make(dtype=dtype)
    spec = env.spec
    assert spec.task == CASES[case]
    assert spec.capabilities.final_obs
    assert spec.step_dt_s > 0
    first = started(env)
    result = env.step(torch.zeros(32, spec.action_dim, dtype=dtype))
    assert result.final_obs is not None
    for groups in (first, result.obs, result.final_obs):
        assert {name: tuple(x.shape) for name, x in groups.items()} == {
            name: (32, size) for name, size in spec.obs_dims.items()
        }
        assert all(x.dtype == dtype and torch.isfinite(x).all() for x in groups.values())
    assert (result.reward.shape, result.reward.dtype) == ((32,), dtype)
    for flags in (result.terminated, result.truncated):
        assert (flags.shape, flags.dtype) == ((32,), torch.bool)


def test_an_ended_episode_starts_anew_in_the_same_step_and_shows_its_end(make: Make) -> None:
    env = make()
    started(env)
    ends = 0
    names: set[tuple[str, ...]] = set()
    before = None
    for result in play(env, 60):
        assert result.final_obs is not None
        ended = result.terminated | result.truncated
        assert not (result.terminated & result.truncated).any()
        changed = (result.obs["actor"] != result.final_obs["actor"]).any(dim=1)
        # Also on a step without ends, where what the simulator says of ends is of an earlier one.
        assert torch.equal(changed, ended)
        if before is not None and ended.any():
            near = (result.final_obs["actor"] - before)[ended].abs().max()
            assert near < 20  # it goes on from the observation before
        before = result.obs["actor"]
        ends += int(ended.sum())
        for values in result.endings.values():
            assert (values.shape, values.dtype) == ((32,), torch.float64)
            assert (values[~ended] == 0).all()  # stale ones are not read
        names.add(tuple(result.endings))
    assert ends > 0
    assert len(names) == 1
    assert names != {()}


def test_returned_tensors_never_change_later(make: Make) -> None:
    env = make()
    tensors = [*started(env).values()]
    for result in play(env, 3):
        assert result.final_obs is not None
        tensors += [*result.obs.values(), *result.final_obs.values()]
        tensors += [result.reward, result.terminated, result.truncated]
    copies = [tensor.clone() for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    play(env, 10)
    env.assign(np.arange(16), iteration=2)
    env.begin_rollout(2)
    play(env, 3)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_the_generators_of_the_trainer_are_left_alone(make: Make) -> None:
    def states() -> tuple[Any, ...]:
        numpy_state = tuple(map(repr, np.random.get_state()))
        return torch.get_rng_state().tolist(), numpy_state, random.getstate()

    before, cudnn = states(), torch.backends.cudnn.benchmark
    env = make()
    started(env)
    play(env, 20)
    env.assign(np.arange(8), iteration=2)
    env.begin_rollout(2)
    play(env, 2)
    env.close()
    assert states() == before
    assert torch.backends.cudnn.benchmark == cudnn


def test_a_seed_gives_the_same_run_and_another_seed_another(make: Make) -> None:
    def run(seed: int) -> list[Tensor]:
        env = make(seed=seed)
        first = started(env)["actor"]
        torch.rand(3)  # what others draw meanwhile does not matter
        return [first, *(result.obs["actor"] for result in play(env, 20))]

    one, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


def test_the_number_of_envs_goes_up_and_down(make: Make, case: str) -> None:
    env = make()
    started(env)
    play(env, 5)
    if case == "stub with Kit":
        assert env.spec.capabilities.resize == "restart"
        before = env.begin_rollout(2)["actor"]
        assert env.assign(np.arange(8, 16), iteration=2).size == 0  # the others are idle
        assert torch.equal(env.begin_rollout(2)["actor"], before[8:16])
        assert play(env, 2)[1].reward.shape == (8,)
        with pytest.raises(EnvCapacityError, match=r"64 envs.*can hold 32"):
            env.assign(np.arange(64), iteration=3)
        assert env.builds == 1
        return
    assert env.spec.capabilities.resize == "rebuild"
    for iteration, count in enumerate((64, 8, 32), start=2):
        ids = np.arange(4, 4 + count)
        assert np.array_equal(env.assign(ids, iteration=iteration), ids)  # all episodes are cut
        assert np.array_equal(env.env_ids, ids)
        env.begin_rollout(iteration)
        assert play(env, 2)[1].obs["actor"].shape == (count, env.spec.obs_dims["actor"])
    assert env.builds == 4


def test_no_envs_at_all_leave_the_simulator_warm(make: Make) -> None:
    env = make()
    started(env)
    assert env.assign(np.arange(0), iteration=2).size == 0
    assert env.begin_rollout(2)["actor"].shape[0] == 0
    assert env.step(torch.zeros(0, env.spec.action_dim)).reward.shape == (0,)
    assert np.array_equal(env.assign(np.arange(32), iteration=3), np.arange(32))
    assert env.builds == 1
    env.close()
    env.close()


def test_envs_that_come_new_begin_while_others_go_on(make: Make) -> None:
    env = make()
    started(env)
    play(env, 5)
    before = env.begin_rollout(2)["actor"]
    ids = np.concatenate([np.arange(16), np.arange(100, 116)])
    assert np.array_equal(env.assign(ids, iteration=2), np.arange(100, 116))
    after = env.begin_rollout(2)["actor"]
    assert torch.equal(after[:16], before[:16])
    assert not torch.equal(after[16:], before[16:])


def test_what_fits_nothing_is_refused_with_what_is_there(make: Make, case: str) -> None:
    with pytest.raises(EnvError, match="'Isaac-Quadruped-Dance' is none of"):
        make(task="Isaac-Quadruped-Dance")
    with pytest.raises(EnvError, match=r"'scene.count'.*has no 'count' there; it has .*num_envs"):
        make(overrides={"scene.count": 3})
    with pytest.raises(EnvError, match="no observation group camera; it has"):
        make(overrides={"obs_groups.critic": ["camera"]})


def test_groups_are_mapped_as_asked(make: Make, case: str) -> None:
    there = "actor" if case == "mjlab" else "policy"
    env = make(overrides={"obs_groups.critic": [there, "extra" if "stub" in case else there]})
    first = started(env)
    size = first["actor"].shape[1]
    assert torch.equal(first["critic"][:, :size], first["actor"])
    assert env.spec.obs_dims["critic"] == (size + 5 if "stub" in case else 2 * size)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_twenty_rebuilds_leak_little(make: Make, case: str) -> None:
    if case == "stub with Kit":
        pytest.skip("with Kit nothing is rebuilt in a process")
    env = make()
    iteration = 1
    grew_mb = 0.0
    for count in (32, 16) * 12:
        iteration += 1
        env.assign(np.arange(count), iteration=iteration)
        env.begin_rollout(iteration)
        play(env, 1)
        if iteration == 5:  # what is allocated once has been
            grew_mb = -resident_mb()
    grew_mb += resident_mb()
    assert env.builds == 24
    assert grew_mb < 60.0, f"20 rebuilds took {grew_mb:.0f} MB"
