"""The contract that every env backend satisfies, as a library: what a backend breaks, in words.

Each rule (`rallypoint.trainer.envs.rules`) makes envs of the backend, one after the other, uses them
as the trainer does, and says what is wrong. ``rallypoint env check`` prints it.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Backend, EnvRequest, EnvSpec, StepResult, VecEnv

_MOST_MESSAGES: Final = 3
"""Of one rule: more would say the same of other envs and steps."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    rule: str
    """Name of the rule that is broken."""
    message: str
    """What was done, what came back, and what should have."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@dataclass(frozen=True)
class Trace:
    """What some steps of an env gave."""

    first: dict[str, Tensor]
    """Observations before the first step."""
    results: tuple[StepResult, ...]

    @property
    def obs(self) -> list[dict[str, Tensor]]:
        """All observations, in order."""
        return [self.first, *(result.obs for result in self.results)]


class Subject:
    """A backend under test: makes its envs, steps them, closes them."""

    def __init__(self, backend: Backend, request: EnvRequest, rebuilds: int) -> None:
        self.backend = backend
        self.request = request
        self.rebuilds = rebuilds
        """How often the leak rule builds anew."""
        self.ids: NDArray[np.int64] = np.arange(request.num_envs, dtype=np.int64)

    @contextlib.contextmanager
    def made(self, *, seed: int | None = None) -> Iterator[VecEnv]:
        """An env that owns nothing, closed at the end."""
        request = self.request
        env = self.backend(request if seed is None else replace(request, seed=seed))
        try:
            yield env
        finally:
            env.close()

    @contextlib.contextmanager
    def begun(
        self,
        ids: NDArray[np.int64] | None = None,
        *,
        seed: int | None = None,
        iteration: int = 1,
    ) -> Iterator[tuple[VecEnv, dict[str, Tensor]]]:
        """An env that owns these ids (all, where none are given), and its first observations."""
        with self.made(seed=seed) as env:
            env.assign(self.ids if ids is None else ids, iteration=iteration)
            yield env, env.begin_rollout(iteration)

    def run(
        self,
        steps: int,
        ids: NDArray[np.int64] | None = None,
        *,
        seed: int | None = None,
        iteration: int = 1,
    ) -> Trace:
        """Some steps of a new env, with the actions of `actions`."""
        with self.begun(ids, seed=seed, iteration=iteration) as (env, first):
            return Trace(first, play(env, steps))


Rule = Callable[[Subject], Iterator[str]]


def actions(env: VecEnv, step: int, *, scale: float = 1.0) -> Tensor:
    """Actions ``[N, A]`` that are a function of env id and step alone, within ±0.8 of ``scale``."""
    columns = np.arange(env.spec.action_dim) * 1.3
    grid = env.env_ids[:, None] * 7.1 + columns + step * 0.37
    return torch.from_numpy(0.8 * scale * np.sin(grid)).to(torch.float32)


def play(env: VecEnv, steps: int, *, first: int = 0) -> tuple[StepResult, ...]:
    """Steps with these actions."""
    return tuple(env.step(actions(env, first + step)) for step in range(steps))


def done(result: StepResult) -> Tensor:
    """Whose episode ended, ``[N]``, on the CPU."""
    return (result.terminated | result.truncated).cpu()


def tensors(result: StepResult) -> dict[str, Tensor]:
    """Everything that a step gave, by name."""
    named = {f"obs[{group!r}]": x for group, x in result.obs.items()}
    named |= {f"final_obs[{group!r}]": x for group, x in (result.final_obs or {}).items()}
    named |= {f"figures[{name!r}]": x for name, x in result.figures.items()}
    named |= {f"reward_terms[{name!r}]": x for name, x in result.reward_terms.items()}
    return named | {
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
    }


def check_env(
    backend: Backend, request: EnvRequest, rules: Mapping[str, Rule], *, rebuilds: int = 6
) -> list[Finding]:
    """What the backend breaks of these rules, empty when nothing. Takes some tens of builds, and
    steps until episodes end."""
    subject = Subject(backend, request, rebuilds)
    found: list[Finding] = []
    for name, rule in rules.items():
        found += [Finding(name, message) for message in _broken(rule, subject)]
        if name == "spec" and found:
            break  # what it says of itself is what the other rules go by
    return found


def _broken(rule: Rule, subject: Subject) -> list[str]:
    messages: list[str] = []
    try:
        for message in rule(subject):
            messages.append(message)
            if len(messages) == _MOST_MESSAGES:
                break
    except Exception as error:  # noqa: BLE001 - whatever an env raises is what is wrong with it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        messages.append(f"raised {type(error).__name__} at {where}: {error}")
    return messages


def describe(spec: EnvSpec) -> str:
    """The task and what its backend can do, in one line."""
    can = spec.capabilities
    groups = ", ".join(f"{name} {size}" for name, size in spec.obs_dims.items())
    abilities = ("carry_state", "final_obs", "deterministic_split", "multi_instance")
    able = [name for name in abilities if getattr(can, name)]
    return (
        f"{spec.task}: observations {groups}; actions {spec.action_dim}; episodes of at most "
        f"{spec.max_episode_steps} steps of {spec.step_dt_s:g} s; on {spec.device}; "
        f"resize {can.resize}; {', '.join(able) or 'no further abilities'}"
    )
