"""The contract suite: on every backend that CI can run, and on envs that break it."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import EnvRequest, VecEnv
from rallypoint.trainer.envs.contract import check_env
from rallypoint.trainer.envs.rules import RULES
from rallypoint.trainer.envs.simulator import RebuiltEnv
from tests.fakes.broken_envs import BROKEN, Leaks, LeavesThreads
from tests.fakes.toy_simulator import CAPABILITIES, Toy

BACKENDS = [
    ("embedded", "pointmass"),
    ("embedded", "cartpole"),
    ("tests.fakes.toy_simulator:make", "toy"),
    ("docs.examples.pendulum:make", "pendulum"),
]


BRIEF = ("spec", "shapes", "aliasing", "seed", "resize", "split", "carried")
"""Rules that need no end of an episode: those of long tasks are a thousand steps away."""


def check(backend: str, task: str, rule: str, *, envs: int = 8) -> list[str]:
    request = EnvRequest(task, seed=1, num_envs=envs)
    return [str(f) for f in check_env(find_backend(backend), request, {rule: RULES[rule]})]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "task"), BACKENDS, ids=[task for _, task in BACKENDS])
def test_every_backend_keeps_every_rule(backend: str, task: str, rule: str) -> None:
    assert check(backend, task, rule) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", BRIEF)
@pytest.mark.parametrize("task", ["quadruped-velocity", "humanoid-track"])
def test_long_tasks_keep_the_rules_about_steps_and_counts(task: str, rule: str) -> None:
    assert check("embedded", task, rule) == []


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["restart", "rebuild"])
def test_simulators_keep_every_rule_however_they_are_resized(resize: str) -> None:
    can = replace(CAPABILITIES, resize=resize, carry_state=resize == "rebuild")  # type: ignore[arg-type]

    def make(request: EnvRequest) -> VecEnv:
        return RebuiltEnv(lambda count: Toy(count, request.seed, can), request)

    rules = {name: rule for name, rule in RULES.items() if name != "leaks"}
    assert check_env(make, EnvRequest("toy", seed=1), rules) == []


@pytest.fixture
def released() -> Iterator[None]:
    LeavesThreads.over.clear()
    yield
    LeavesThreads.over.set()
    Leaks.kept.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_env_is_found_in_words(name: str) -> None:
    rule, broken, words = BROKEN[name]
    found = check_env(broken, EnvRequest("broken", seed=1), {rule: RULES[rule]})
    assert {finding.rule for finding in found} == {rule}
    assert any(re.search(words, finding.message) for finding in found), found


def test_every_rule_has_an_env_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BROKEN.values()} == set(RULES)


def test_what_an_env_raises_is_a_finding_with_its_place() -> None:
    class Raises:
        def __init__(self, request: EnvRequest) -> None:
            raise ValueError("no such robot")

    (found,) = check_env(Raises, EnvRequest("x", seed=1), RULES)  # type: ignore[arg-type]
    assert found.rule == "spec"
    assert "raised ValueError at test_contract_suite.py:" in found.message
    assert "no such robot" in found.message
