"""The rules of the env contract, in the order in which they are checked: steps and episodes.

Rules about building, resizing and closing are in `rallypoint.trainer.envs.resizing`.
"""

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rallypoint.trainer.envs import resizing
from rallypoint.trainer.envs.base import StepResult, VecEnv
from rallypoint.trainer.envs.contract import Rule, Subject, actions, done, play, tensors

_STEPS: Final = 12
_MOST_STEPS: Final = 2500
"""Longest search for the end of an episode."""
_ENOUGH: Final = 3
"""This many ends an env show how they go."""


def spec(subject: Subject) -> Iterator[str]:
    """What it says of itself makes sense, and a new env owns nothing."""
    with subject.made() as env:
        told = env.spec
        if "actor" not in told.obs_dims:
            yield f"obs_dims has the groups {sorted(told.obs_dims)}; 'actor' must be one of them"
        sizes = {**told.obs_dims, "action_dim": told.action_dim}
        sizes["max_episode_steps"] = told.max_episode_steps
        for name, size in sizes.items():
            if size < 1:
                yield f"{name} = {size} must be at least 1"
        if not told.step_dt_s > 0:
            yield f"step_dt_s = {told.step_dt_s} must be above 0"
        if env.env_ids.size:
            yield f"a new env owns {env.env_ids.tolist()}; it must own nothing before assign()"
        capacity = env.capacity_envs
        if capacity is not None and capacity < subject.ids.size:
            yield f"it can hold {capacity} envs; the checks need {subject.ids.size}"


def shapes(subject: Subject) -> Iterator[str]:
    """Shapes, dtypes and devices follow the spec; values are finite; names stay."""
    with subject.begun() as (env, first):
        yield from _groups(subject, env, first, "begin_rollout()")
        names = None
        for step, result in enumerate(play(env, _STEPS)):
            yield from _step_shapes(subject, env, result)
            here = sorted(result.figures), sorted(result.reward_terms)
            if names is not None and here != names:
                yield f"figures and reward terms are {here} in step {step}, and were {names} before"
            names = here


def _groups(subject: Subject, env: VecEnv, obs: Mapping[str, Tensor], what: str) -> Iterator[str]:
    dims, count = env.spec.obs_dims, subject.ids.size
    if set(obs) != set(dims):
        yield f"{what} has the groups {sorted(obs)}, and the spec {sorted(dims)}"
        return
    for name, size in dims.items():
        yield from _like(f"{what}[{name!r}]", obs[name], (count, size), subject.request.dtype, env)


def _step_shapes(subject: Subject, env: VecEnv, result: StepResult) -> Iterator[str]:
    yield from _groups(subject, env, result.obs, "obs")
    if result.final_obs is not None:
        yield from _groups(subject, env, result.final_obs, "final_obs")
    count, dtype = (subject.ids.size,), subject.request.dtype
    yield from _like("reward", result.reward, count, dtype, env)
    for name, flag in (("terminated", result.terminated), ("truncated", result.truncated)):
        yield from _like(name, flag, count, torch.bool, env)
    for name, value in (*result.figures.items(), *result.reward_terms.items()):
        yield from _like(name, value, count, torch.float64, env)


def _like(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, env: VecEnv
) -> Iterator[str]:
    if tuple(value.shape) != shape or value.dtype != dtype:
        yield (f"{name} is {tuple(value.shape)} of {value.dtype}; it must be {shape} of {dtype}")
    elif value.device.type != env.spec.device.type:
        yield f"{name} is on {value.device}, and the spec says {env.spec.device}"
    elif not value.isfinite().all():
        yield f"{name} has values that are not finite"
    elif value.requires_grad:
        yield f"{name} requires a gradient; detach it"


def auto_reset(subject: Subject) -> Iterator[str]:
    """An episode that ends begins anew in the same step, with ``final_obs`` from before."""
    with subject.begun() as (env, _):
        ended = 0
        before: Tensor | None = None  # whose episode ended in the step before
        limit = min(_MOST_STEPS, env.spec.max_episode_steps + 1)
        for step in range(limit):
            result = env.step(actions(env, step))
            if bool((result.terminated & result.truncated).any()):
                yield f"step {step}: an episode is terminated and truncated; termination wins"
            yield from _next_step(step, result, before)
            now = done(result)
            ended += int(now.sum())
            if now.any():
                yield from _finals(env, step, result, now)
            before = now
            if ended >= _ENOUGH * subject.ids.size:
                return
        if not ended and env.spec.max_episode_steps < limit:
            yield (
                f"no episode of {subject.ids.size} envs ended in {limit} steps, and max_episode_steps = "
                f"{env.spec.max_episode_steps}"
            )


def _finals(env: VecEnv, step: int, result: StepResult, now: Tensor) -> Iterator[str]:
    if not env.spec.capabilities.final_obs:
        return
    if result.final_obs is None:
        yield f"step {step}: an episode ended, and there is no final_obs, which the spec declares"
        return
    same = (result.obs["actor"] == result.final_obs["actor"]).all(dim=1).cpu() & now
    if same.any():
        yield (
            f"step {step}: obs of env {_id(env, same)}, whose episode ended, is still that of the old "
            "episode (it equals final_obs): it must be the first of the next one, in the same step"
        )


def _next_step(step: int, result: StepResult, before: Tensor | None) -> Iterator[str]:
    """A step that only resets gives reward 0 and no end in each row that ended before."""
    if before is None or not before.any() or before.all():
        return
    reward = result.reward.cpu()
    if (reward[before] == 0).all() and (reward[~before] != 0).all():
        yield (
            f"step {step}: rewards are 0 exactly where an episode ended in step {step - 1}: this step "
            "only reset those envs (NEXT_STEP); they must be reset in the step that ends them (SAME_STEP)"
        )


def time_limit(subject: Subject) -> Iterator[str]:
    """No episode is longer than the spec says."""
    with subject.begun() as (env, _):
        most = env.spec.max_episode_steps
        if most > _MOST_STEPS:
            return
        lengths = torch.zeros(subject.ids.size, dtype=torch.int64)
        for step in range(most + 1):
            result = env.step(actions(env, step))
            lengths += 1
            late = (lengths > most) | ((lengths == most) & ~done(result))
            if late.any():
                yield f"the episode of env {_id(env, late)} goes on past max_episode_steps = {most}"
                return
            lengths[done(result)] = 0


def final_obs(subject: Subject) -> Iterator[str]:
    """Final observations are those of the step in which an episode ended, never older ones."""
    with subject.begun() as (env, _):
        if not env.spec.capabilities.final_obs:
            return
        last: dict[int, tuple[int, Tensor]] = {}
        compared = 0
        for step in range(min(_MOST_STEPS, 2 * env.spec.max_episode_steps + 2)):
            result = env.step(actions(env, step))
            final = result.final_obs
            for row in done(result).nonzero()[:, 0].tolist() if final is not None else ():
                assert final is not None  # noqa: S101 - for the type checker
                seen = final["actor"][row].cpu().clone()
                before = last.get(row)
                if before is not None and torch.equal(before[1], seen):
                    yield (
                        f"final_obs of env {int(env.env_ids[row])} in step {step} is that of step "
                        f"{before[0]}: a stale entry of extras was read"
                    )
                    return
                last[row] = step, seen
                compared += before is not None
            if compared >= subject.ids.size:
                return


def aliasing(subject: Subject) -> Iterator[str]:
    """Returned tensors are never written again, by the env or through it."""
    with subject.begun() as (env, first):
        held = {f"begin_rollout()[{g!r}]": x for g, x in first.items()}
        results = play(env, 3)
        for step, result in enumerate(results):
            held |= {f"{name} of step {step}": x for name, x in tensors(result).items()}
        places: dict[int, str] = {}
        for name, value in held.items():
            other = places.setdefault(value.data_ptr(), name)
            if other != name and value.numel():
                yield f"{name} and {other} are the same memory"
                return
        copies = {name: value.clone() for name, value in held.items()}
        play(env, _STEPS, first=3)
        for name, value in held.items():
            if not torch.equal(value, copies[name]):
                yield f"{name} was written again by a later step; return a copy"
                return
    yield from _written_by_others(subject)


def _written_by_others(subject: Subject) -> Iterator[str]:
    """What the caller does to tensors does not reach the env, nor the other way round."""
    expected = subject.run(_STEPS)
    with subject.begun() as (env, first):
        for group in first.values():
            group.fill_(7.0)
        for step in range(_STEPS):
            given = actions(env, step)
            kept = given.clone()
            result = env.step(given)
            if not torch.equal(given, kept):
                yield f"step {step} changed the actions that it was given"
                return
            if not torch.equal(result.reward, expected.results[step].reward):
                yield (
                    f"step {step} gave other rewards after returned tensors had been overwritten by the "
                    "caller (or a run with the same seed is not the same: see seed)"
                )
                return
            for value in tensors(result).values():
                value.fill_(1)


def randomness(subject: Subject) -> Iterator[str]:
    """Global generators of torch, numpy and Python are as before, and do not matter."""
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    autotune = torch.backends.cudnn.benchmark
    states = _generators()
    once = subject.run(_STEPS)
    after = _generators()
    for name in states:
        if states[name] != after[name]:
            yield (
                f"the global generator of {name} is not where it was: building, resetting or stepping "
                "drew from it or reseeded it; keep it apart (isolation.OwnRandomness)"
            )
    if torch.backends.cudnn.benchmark != autotune:
        yield "torch.backends.cudnn.benchmark was changed"
    torch.manual_seed(12)
    np.random.seed(12)
    random.seed(12)
    again = subject.run(_STEPS)
    if not _same(once.obs, again.obs):
        yield "a run depends on the global generators: with others the same seed gave another run"


def _generators() -> dict[str, object]:
    _, keys, *position = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (np.asarray(keys).tobytes(), *position),
        "random": random.getstate(),
    }


def seed(subject: Subject) -> Iterator[str]:
    """A seed gives the same run, another seed another; another iteration begins other episodes."""
    once, again = subject.run(_STEPS), subject.run(_STEPS)
    if not _same(once.obs, again.obs):
        yield f"two runs of {_STEPS} steps with the same seed and actions differ"
    other = subject.run(0, seed=subject.request.seed + 1)
    if _same([once.first], [other.first]):
        yield "another seed gave the same first observations"
    later = subject.run(0, iteration=2)
    if _same([once.first], [later.first]):
        yield (
            "episodes that begin in iteration 2 begin as those of iteration 1: envs that are made again "
            "would repeat their episodes; key the draws by the iteration given to assign()"
        )


def _same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(x[g], y[g]) for x, y in zip(a, b, strict=True) for g in x)


def action_bound(subject: Subject) -> Iterator[str]:
    """Where a bound is declared, greater actions are as those at the bound."""
    with subject.begun() as (env, _):
        bound = env.spec.action_bound
        if bound is None:
            return
        clipped = [
            env.step(actions(env, s, scale=9 * bound).clamp(-bound, bound)) for s in range(4)
        ]
    with subject.begun() as (env, _):
        beyond = [env.step(actions(env, step, scale=9 * bound)) for step in range(4)]
    if not _same([r.obs for r in clipped], [r.obs for r in beyond]):
        yield f"action_bound = {bound:g} is declared, but greater actions are not as those at the bound"


def _id(env: VecEnv, rows: Tensor) -> int:
    """Global id of the first of these rows."""
    return int(env.env_ids[int(rows.nonzero()[0])])


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "spec": spec,
        "shapes": shapes,
        "auto_reset": auto_reset,
        "time_limit": time_limit,
        "final_obs": final_obs,
        "aliasing": aliasing,
        "randomness": randomness,
        "seed": seed,
        "action_bound": action_bound,
        **resizing.RULES,
    }
)
"""All rules by name."""
