"""The contract of envs, on Isaac Lab, on mjlab, and on a stub of Isaac Lab with and without Kit. A simulator
that is not installed is skipped, with what would install it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import Backend, EnvRequest, VecEnv
from rallypoint.trainer.envs.contract import check_env
from rallypoint.trainer.envs.rules import RULES
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
    "stub with terrain": isaaclab_stub.ROUGH,
    "isaaclab direct": "Isaac-Cartpole-Direct",
    "isaaclab manager": "Isaac-Cartpole",
    "mjlab": "Mjlab-Cartpole-Balance",
}
OVERRIDES = {
    "isaaclab direct": {"episode_length_s": 0.5},
    "isaaclab manager": {"episode_length_s": 0.5},
}
"""Episodes of 30 steps: rules look for their ends."""

Make = Callable[..., VecEnv]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not name.startswith("stub"):
        request.getfixturevalue("need")(name.split()[0])
        if name.startswith("isaaclab"):
            request.getfixturevalue("assets")
    return name


@pytest.fixture
def backend(case: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if case.startswith("stub"):

        def in_new_process(request: EnvRequest) -> VecEnv:
            isaaclab_stub.install(monkeypatch, kit="Kit" in case)
            return find_backend("isaaclab")(request)

        return in_new_process
    return find_backend(case.split()[0])


@pytest.fixture
def wanted(case: str) -> EnvRequest:
    return EnvRequest(CASES[case], seed=1, num_envs=8, overrides=OVERRIDES.get(case, {}))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_kept(backend: Backend, wanted: EnvRequest, rule: str) -> None:
    found = check_env(backend, wanted, {rule: RULES[rule]}, rebuilds=20)
    assert [str(finding) for finding in found] == []


def test_ends_are_told_in_the_rows_that_ended_alone(backend: Backend, wanted: EnvRequest) -> None:
    env = backend(wanted)
    env.assign(np.arange(8), iteration=1)
    env.begin_rollout(1)
    names, ends, quiet = set(), 0, 0
    for _ in range(60):
        result = env.step(torch.ones(8, env.spec.action_dim))
        ended = result.terminated | result.truncated
        ends += int(ended.sum())
        quiet += not ended.any()  # what the simulator says is of an earlier step then
        for values in result.endings.values():
            assert (values.shape, values.dtype) == ((8,), torch.float64)
            assert (values[~ended] == 0).all()
        names.add(tuple(result.endings))
    env.close()
    assert ends > 0
    assert quiet > 0
    assert len(names) == 1
    assert names != {()}


def test_with_kit_envs_are_idle_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = isaaclab_stub.install(monkeypatch, kit=True)
    env = find_backend("isaaclab")(EnvRequest(isaaclab_stub.TASK, seed=1, num_envs=32))
    assert env.spec.capabilities.resize == "restart"
    env.assign(np.arange(32), iteration=1)
    before = env.begin_rollout(1)["actor"]
    assert env.assign(np.arange(8, 16), iteration=2).size == 0
    assert torch.equal(env.begin_rollout(2)["actor"], before[8:16])
    with pytest.raises(EnvCapacityError, match=r"64 envs.*can hold 32"):
        env.assign(np.arange(64), iteration=3)
    assert stub.launches == 1
    env.close()


def test_what_is_drawn_once_differs_between_processes_and_stays_with_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isaaclab_stub.install(monkeypatch, kit=False)
    masses = {}
    for life, process in enumerate(("a/0", "a/1", "b/0", "a/0")):
        request = EnvRequest(isaaclab_stub.TASK, seed=1, num_envs=8, process=process)
        env = find_backend("isaaclab")(request)
        assert isaaclab_stub.Env.running is not None
        masses[life] = isaaclab_stub.Env.running.masses
        env.close()
    assert torch.equal(masses[0], masses[3])
    assert len({tuple(drawn.tolist()) for drawn in masses.values()}) == 3


def test_a_simulation_on_another_device_than_the_slots_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isaaclab_stub.install(monkeypatch, kit=False)
    make = isaaclab_stub.Env.__init__

    def elsewhere(self: isaaclab_stub.Env, cfg: isaaclab_stub.Cfg) -> None:
        make(self, cfg)
        self.device = "meta"

    monkeypatch.setattr(isaaclab_stub.Env, "__init__", elsewhere)
    with pytest.raises(EnvError, match=r"runs on meta .*, not on the device of its slot, cpu"):
        find_backend("isaaclab")(EnvRequest(isaaclab_stub.TASK, seed=1))
    assert isaaclab_stub.Env.running is None  # it was ended


def test_a_curriculum_goes_on_in_a_simulator_that_is_built_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isaaclab_stub.install(monkeypatch, kit=False)
    request = EnvRequest(isaaclab_stub.TASK, seed=1, num_envs=8, rollout_steps=5)
    env = find_backend("isaaclab")(request)
    began: list[int] = []
    begin = isaaclab_stub.Env._begin

    def noted(self: isaaclab_stub.Env, rows: object) -> None:
        began.append(self.common_step_counter)
        begin(self, rows)

    monkeypatch.setattr(isaaclab_stub.Env, "_begin", noted)
    for iteration, count in ((0, 8), (1, 8), (2, 16), (7, 16)):
        env.assign(np.arange(count), iteration=iteration)
        env.begin_rollout(iteration)
        running = isaaclab_stub.Env.running
        assert running is not None
        assert running.common_step_counter == max(0, iteration - 1) * 5
    assert began[-1] == 5  # episodes of the new simulator, for iteration 2
    assert env.builds == 2
    env.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "Isaac-Quadruped-Dance"}, "'Isaac-Quadruped-Dance' is none of"),
        (
            {"overrides": {"scene.count": 3}},
            r"'scene.count'.*has no 'count' there; it has .*num_envs",
        ),
        ({"overrides": {"obs_groups.critic": ["camera"]}}, "no observation group camera; it has"),
    ],
    ids=["task", "setting", "group"],
)
def test_what_fits_nothing_is_refused_with_what_is_there(
    backend: Backend, wanted: EnvRequest, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvError, match=words):
        backend(replace(wanted, **changes))
    backend(wanted).close()  # nothing of it is left


def test_groups_are_mapped_as_asked(backend: Backend, wanted: EnvRequest, case: str) -> None:
    there = "actor" if case == "mjlab" else "policy"
    second = "extra" if "stub" in case else there
    groups = {"obs_groups.critic": [there, second]}
    env = backend(replace(wanted, overrides={**wanted.overrides, **groups}))
    env.assign(np.arange(8), iteration=1)
    first = env.begin_rollout(1)
    size = first["actor"].shape[1]
    assert torch.equal(first["critic"][:, :size], first["actor"])
    assert env.spec.obs_dims["critic"] == (size + 5 if "stub" in case else 2 * size)
    env.close()
