"""Envs on a simulator whose number of envs is fixed when it is built."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import EnvRequest, StepResult
from rallypoint.trainer.envs.simulator import RebuiltEnv
from rallypoint.trainer.errors import EnvCapacityError, EnvError
from tests.fakes.toy_simulator import CAPABILITIES, Toy, make

REQUEST = EnvRequest("toy", seed=3, num_envs=8)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def steps(env: RebuiltEnv, count: int) -> list[StepResult]:
    actions = torch.from_numpy(np.sin(env.env_ids * 7.1))[:, None]
    return [env.step(actions) for _ in range(count)]


def env_with_memory(most: int, *, resize: Literal["rebuild", "restart"] = "rebuild") -> RebuiltEnv:
    """Builds of more than ``most`` envs run out of memory."""
    capabilities = replace(CAPABILITIES, resize=resize)

    def build(count: int) -> Toy:
        if count > most:
            raise torch.OutOfMemoryError(f"no room for {count}")
        return Toy(count, 3, capabilities)

    return RebuiltEnv(build, REQUEST)


def test_it_is_built_once_for_the_count_that_was_expected() -> None:
    env = make(REQUEST)
    assert np.array_equal(env.assign(np.arange(8), iteration=1), np.arange(8))
    assert env.assign(ids(), iteration=1).size == 0
    assert np.array_equal(env.assign(np.arange(16, 24), iteration=1), np.arange(16, 24))
    assert (env.builds, env.capacity_envs) == (1, None)


def test_another_count_is_another_simulator_and_cuts_every_episode() -> None:
    env = make(REQUEST)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    steps(env, 3)
    assert np.array_equal(env.assign(np.arange(16), iteration=2), np.arange(16))
    assert env.builds == 2
    obs = env.begin_rollout(2)
    assert obs["critic"].shape == (16, 4)
    assert (obs["actor"][:, 2] == 0).all()  # steps of the episode


def test_with_the_same_count_those_that_stay_go_on() -> None:
    env = make(REQUEST)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    steps(env, 3)
    before = env.begin_rollout(2)["actor"]
    kept = np.arange(4, 8)
    begun = env.assign(np.concatenate([ids(100, 101, 2, 1), kept]), iteration=2)
    assert np.array_equal(begun, ids(100, 101))
    assert np.array_equal(env.env_ids, ids(1, 2, 4, 5, 6, 7, 100, 101))
    after = env.begin_rollout(2)["actor"]
    assert torch.equal(after[:6], before[[1, 2, 4, 5, 6, 7]])
    assert (after[6:, 2] == 0).all()
    assert env.builds == 1


def test_rows_are_carried_over_a_rebuild_where_the_simulator_can() -> None:
    capabilities = replace(CAPABILITIES, carry_state=True)
    env = RebuiltEnv(lambda count: Toy(count, 3, capabilities), REQUEST)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    steps(env, 3)
    before = env.begin_rollout(2)["actor"]
    assert np.array_equal(env.assign(np.arange(2, 18), iteration=2), np.arange(8, 18))
    assert torch.equal(env.begin_rollout(2)["actor"][:6], before[2:])
    rows = env.rows()
    fresh = RebuiltEnv(lambda count: Toy(count, 3, capabilities), REQUEST)
    fresh.assign(np.arange(2, 18), iteration=2)
    fresh.load_rows(env.env_ids[::-1], {name: values[::-1] for name, values in rows.items()})
    assert torch.equal(fresh.begin_rollout(2)["critic"], env.begin_rollout(2)["critic"])


def test_without_carried_state_there_are_no_rows() -> None:
    env = make(REQUEST)
    env.assign(np.arange(8), iteration=1)
    assert env.rows() == {}
    env.load_rows(env.env_ids, {})
    with pytest.raises(EnvError, match=r"\[9\].*not owned"):
        env.load_rows(ids(9), {})


def test_one_that_cannot_be_rebuilt_keeps_idle_rows_and_never_grows() -> None:
    env = env_with_memory(64, resize="restart")
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    steps(env, 3)
    before = env.begin_rollout(2)["actor"]
    assert env.assign(ids(2, 5), iteration=2).size == 0
    assert torch.equal(env.begin_rollout(2)["actor"], before[[2, 5]])
    assert steps(env, 1)[0].reward.shape == (2,)
    assert np.array_equal(env.assign(np.arange(8), iteration=3), ids(0, 1, 3, 4, 6, 7))
    assert (env.builds, env.capacity_envs) == (1, 8)
    with pytest.raises(EnvCapacityError, match=r"16 envs are asked for.* can hold 8"):
        env.assign(np.arange(16), iteration=3)


def test_memory_that_runs_out_at_the_first_build_teaches_the_capacity() -> None:
    env = env_with_memory(5)
    assert (env.capacity_envs, env.builds) == (4, 1)
    env.assign(np.arange(4), iteration=1)
    with pytest.raises(EnvCapacityError) as refusal:
        env.assign(np.arange(8), iteration=1)
    assert refusal.value.capacity_envs == 4
    assert np.array_equal(env.env_ids, np.arange(4))


def test_warp_says_in_its_own_words_that_memory_has_run_out() -> None:
    def build(count: int) -> Toy:
        if count > 5:
            raise RuntimeError("Failed to allocate 33554432 bytes on device 'cuda:0'")
        return Toy(count, 3)

    assert RebuiltEnv(build, REQUEST).capacity_envs == 4


def test_memory_that_runs_out_later_leaves_what_was_owned_before() -> None:
    env = env_with_memory(12)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    with pytest.raises(EnvCapacityError) as refusal:
        env.assign(np.arange(64), iteration=2)
    assert refusal.value.capacity_envs == env.capacity_envs == 8
    assert np.array_equal(env.env_ids, np.arange(8))
    env.begin_rollout(2)
    assert steps(env, 1)[0].reward.shape == (8,)


@pytest.mark.parametrize("error", [ValueError("no such robot"), MemoryError("not even one")])
def test_what_else_goes_wrong_in_a_build_is_raised(error: Exception) -> None:
    def build(count: int) -> Toy:
        raise error

    with pytest.raises(type(error), match=str(error)):
        RebuiltEnv(build, replace(REQUEST, num_envs=1))


def test_global_random_state_is_its_own() -> None:
    def trace(disturb: Callable[[], object]) -> torch.Tensor:
        env = make(REQUEST)
        env.assign(np.arange(8), iteration=1)
        env.begin_rollout(1)
        out = []
        for _ in range(3):
            disturb()
            out.append(steps(env, 1)[0].obs["actor"])
        return torch.stack(out)

    torch.manual_seed(5)
    expected = torch.rand(6)
    torch.manual_seed(5)
    undisturbed = trace(lambda: None)
    assert torch.equal(torch.rand(6), expected)
    assert torch.equal(trace(lambda: torch.rand(1)), undisturbed)


@pytest.mark.parametrize("wrong", ["reward", "obs", "final_obs"])
def test_a_simulator_that_breaks_its_contract_is_refused(wrong: str) -> None:
    class Broken(Toy):
        def step(self, actions: torch.Tensor, seeds: object) -> StepResult:
            result = super().step(actions, seeds)  # type: ignore[arg-type]
            values = {"reward": torch.zeros(8, 1), "obs": {"actor": torch.zeros(8, 3)}}
            change: dict[str, Any] = {wrong: values.get(wrong)}
            return replace(result, **change)

    env = RebuiltEnv(lambda count: Broken(count, 3), REQUEST)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    with pytest.raises(EnvError, match=wrong):
        steps(env, 1)


def test_wrong_calls_are_refused() -> None:
    env = make(REQUEST)
    with pytest.raises(EnvError, match="twice"):
        env.assign(ids(1, 1), iteration=1)
    env.assign(np.arange(8), iteration=1)
    with pytest.raises(EnvError, match="begin_rollout"):
        steps(env, 1)
    env.begin_rollout(1)
    with pytest.raises(EnvError, match=r"\(3, 1\), expected \(8, 1\)"):
        env.step(torch.zeros(3, 1))
    with pytest.raises(EnvError, match=r"envs \[0 1 2 3 4 5 6 7\] are not finite"):
        env.step(torch.full((8, 1), torch.nan))
    env.close()
    env.close()
    with pytest.raises(EnvError, match="closed"):
        env.step(torch.zeros(8, 1))


# --- built beside the one that steps -----------------------------------------------------------------


class Gate:
    """Builds of 16 envs wait until they are let."""

    def __init__(self, error: Exception | None = None) -> None:
        self.let, self.built, self.error = threading.Event(), list[Toy](), error

    def build(self, count: int) -> Toy:
        if count == 16:
            assert self.let.wait(30)
            if self.error is not None and threading.current_thread() is not threading.main_thread():
                raise self.error
        self.built.append(Toy(count, 3))
        return self.built[-1]

    def env(self) -> RebuiltEnv:
        env = RebuiltEnv(self.build, REQUEST)
        env.assign(np.arange(8), iteration=1)
        env.begin_rollout(1)
        return env

    def finish(self, env: RebuiltEnv) -> None:
        self.let.set()
        deadline_s = time.monotonic() + 30
        while not env.prepare(16):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def test_the_next_simulator_is_built_while_the_present_one_steps() -> None:
    gate = Gate()
    env = gate.env()
    assert not env.prepare(16)
    steps(env, 3)
    assert not env.prepare(16)
    assert env.builds == 1
    gate.finish(env)
    env.assign(np.arange(16), iteration=2)
    assert (env.builds, len(gate.built)) == (2, 2)
    env.begin_rollout(2)
    assert steps(env, 1)[0].reward.shape == (16,)


def test_nothing_is_prepared_where_nothing_has_to_be_built() -> None:
    env = Gate().env()
    assert env.prepare(8)
    assert env.prepare(0)
    assert env_with_memory(8, resize="restart").prepare(16)
    alone = replace(CAPABILITIES, multi_instance=False)
    assert RebuiltEnv(lambda count: Toy(count, 3, alone), REQUEST).prepare(16)


def test_what_was_prepared_for_another_count_is_closed() -> None:
    gate = Gate()
    env = gate.env()
    assert not env.prepare(16)
    env.assign(np.arange(24), iteration=2)
    gate.let.set()
    env.close()
    deadline_s = time.monotonic() + 30
    while len(gate.built) < 3 or len(gate.built[2]._state):  # closed by its own thread
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_without_memory_for_two_the_old_one_is_closed_first() -> None:
    gate = Gate(MemoryError("two are too many"))
    env = gate.env()
    env.prepare(16)
    gate.finish(env)
    env.assign(np.arange(16), iteration=2)
    assert (env.builds, env.capacity_envs) == (2, None)


def test_an_error_of_the_build_beside_is_raised_where_it_is_needed() -> None:
    gate = Gate(ValueError("no such robot"))
    env = gate.env()
    env.prepare(16)
    gate.finish(env)
    with pytest.raises(ValueError, match="no such robot"):
        env.assign(np.arange(16), iteration=2)
