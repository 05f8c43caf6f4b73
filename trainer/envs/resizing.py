"""Rules of the env contract about other env counts: resizing, splitting, carrying, leaks, closing."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.envs.contract import Rule, Subject, play
from rallypoint.trainer.errors import EnvCapacityError, EnvError

_STEPS: Final = 6
_LEAK_BYTES: Final = 4 * 2**20
"""A build may leave this much behind; Isaac Lab was measured to leave about 1 MiB."""
_SETTLED: Final = 2
"""Builds before memory is compared: allocators and caches fill."""


def resize(subject: Subject) -> Iterator[str]:
    """Fewer, more, none and others are owned; what is said to go on does so."""
    count = subject.ids.size
    with subject.begun() as (env, _):
        play(env, _STEPS)
        builds, kind = env.builds, env.spec.capabilities.resize
        half, more = subject.ids[: count // 2], np.arange(count + count // 2, dtype=np.int64)
        others = np.concatenate([half, subject.ids[count // 2 :] + 1000])
        for iteration, wanted in enumerate((half, subject.ids, others, more, half[:0], half), 2):
            if kind == "restart" and wanted.size > count:
                yield from _refuses(env, wanted, iteration)
                continue
            yield from _resized(env, wanted, iteration)
        if kind != "rebuild" and env.builds != builds:
            yield f"resize = {kind!r} is declared, and the simulator was built {env.builds} times"


def _refuses(env: VecEnv, wanted: NDArray[np.int64], iteration: int) -> Iterator[str]:
    try:
        env.assign(wanted, iteration=iteration)
    except EnvCapacityError as refusal:
        if refusal.capacity_envs >= wanted.size:
            yield f"{wanted.size} envs are refused with a capacity of {refusal.capacity_envs}"
        return
    yield f"resize = 'restart' is declared, but {wanted.size} envs were taken in the same process"


def _resized(env: VecEnv, wanted: NDArray[np.int64], iteration: int) -> Iterator[str]:
    before, ids = env.begin_rollout(iteration), env.env_ids
    text = f"assign() from {ids.size} to {wanted.size} envs"
    begun = env.assign(wanted[::-1].copy(), iteration=iteration)
    if not np.array_equal(env.env_ids, wanted):
        yield f"{text}: env_ids is {env.env_ids}; it must be what was assigned, ascending"
        return
    new = np.setdiff1d(wanted, ids)
    if np.setdiff1d(new, begun).size or np.setdiff1d(begun, wanted).size:
        yield f"{text}: begun episodes are given as {begun}; the new ids {new} must be among them"
    if env.spec.capabilities.resize == "exact" and np.setdiff1d(begun, new).size:
        yield f"{text}: resize = 'exact' is declared, but episodes of envs that stay began anew"
    stay = np.setdiff1d(np.intersect1d(wanted, ids), begun)
    after = env.begin_rollout(iteration)
    for group, obs in after.items():
        here, there = (torch.from_numpy(np.searchsorted(i, stay)) for i in (wanted, ids))
        if not torch.equal(obs.cpu()[here], before[group].cpu()[there]):
            yield f"{text}: envs that stay do not go on: their observations ({group}) changed"
    for result in play(env, 2):
        found = (tuple(result.reward.shape), tuple(result.obs["actor"].shape))
        expected = ((wanted.size,), (wanted.size, env.spec.obs_dims["actor"]))
        if found != expected:
            yield f"{text}: reward and obs of a step then have the shapes {found}, not {expected}"
            return


def refusals(subject: Subject) -> Iterator[str]:
    """Ids that occur twice and actions of another shape are refused with `EnvError`."""
    with subject.begun() as (env, _):
        wrong = torch.zeros(subject.ids.size + 1, env.spec.action_dim)
        twice = np.append(subject.ids, subject.ids[-1])
        for what, call in (
            ("actions for one env more than are owned", lambda: env.step(wrong)),
            ("an env id that occurs twice", lambda: env.assign(twice, iteration=2)),
        ):
            try:
                call()
            except EnvError:
                continue
            yield f"{what}: taken without an EnvError"


def split(subject: Subject) -> Iterator[str]:
    """With ``deterministic_split``, envs do not depend on who is beside them."""
    with subject.made() as env:
        if not env.spec.capabilities.deterministic_split:
            return
    half = subject.ids.size // 2
    whole = subject.run(4 * _STEPS)
    for part in (slice(0, half), slice(half, None)):
        alone = subject.run(4 * _STEPS, subject.ids[part])
        for step, (a, b) in enumerate(zip(whole.results, alone.results, strict=True)):
            same = torch.equal(a.reward[part], b.reward)
            same &= torch.equal(a.obs["actor"][part], b.obs["actor"])
            if not same:
                yield (
                    f"deterministic_split is declared, but envs {subject.ids[part]} alone differ from "
                    f"the same envs among {subject.ids.size} in step {step}"
                )
                break


def carried(subject: Subject) -> Iterator[str]:
    """With ``carry_state``, rows put into another env go on there; without, there are none to put."""
    with subject.begun() as (env, _):
        play(env, _STEPS)
        rows, here = env.rows(), env.begin_rollout(2)
        if not env.spec.capabilities.carry_state:
            env.load_rows(env.env_ids, rows)
            return
        expected = [result.reward.cpu() for result in play(env, _STEPS)]
    for name, values in rows.items():
        if values.shape[:1] != subject.ids.shape:
            yield f"rows()[{name!r}] has the shape {values.shape}, not one row per env"
    exact = env.spec.capabilities.resize == "exact"
    with subject.begun(iteration=2) as (env, _):
        env.load_rows(subject.ids, rows)
        there = env.begin_rollout(2)
        found = [result.reward.cpu() for result in play(env, _STEPS)]
        pairs: list[tuple[str, Tensor, Tensor]] = [(g, here[g].cpu(), there[g].cpu()) for g in here]
        pairs += [("reward", a, b) for a, b in zip(expected, found, strict=True)]
    for name, a, b in pairs:
        if not (torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-3)):
            yield f"carry_state is declared, but {name} is another after rows() and load_rows()"
            return


def instances(subject: Subject) -> Iterator[str]:
    """With ``multi_instance``, two envs in one process do not disturb each other."""
    with subject.made() as env:
        if not env.spec.capabilities.multi_instance:
            return
    expected = subject.run(_STEPS)
    with subject.begun() as (one, _), subject.begun(subject.ids + 500) as (other, _):
        for step in range(_STEPS):
            result = play(one, 1, first=step)[0]
            play(other, 1, first=step)
            if not torch.equal(result.obs["actor"], expected.results[step].obs["actor"]):
                yield "multi_instance is declared, but an env runs otherwise beside another one"
                return


def leaks(subject: Subject) -> Iterator[str]:
    """Building anew again and again leaves little memory, and no thread, process or file behind."""
    small = replace(subject.request, num_envs=max(1, subject.ids.size // 2))
    settled = 0, _held()
    for turn in range(_SETTLED + subject.rebuilds):
        if turn == _SETTLED:
            settled = _left()
        turned = Subject(subject.backend, small if turn % 2 else subject.request, 0)
        turned.run(2)
    size, held = _left()
    growth = (size - settled[0]) / subject.rebuilds
    if growth > _LEAK_BYTES:
        yield (
            f"each of {subject.rebuilds} builds left {growth / 2**20:.1f} MiB behind, more than "
            f"{_LEAK_BYTES / 2**20:g}"
        )
    for what, before in settled[1].items():
        more = (held[what] - before) / subject.rebuilds
        if more >= 1:
            yield f"each of {subject.rebuilds} builds left {more:.1f} {what} behind; close() ends them"


def close(subject: Subject) -> Iterator[str]:
    """After ``close`` nothing runs any more, and a second one does nothing."""
    subject.run(0)  # what is made once per process
    gc.collect()
    before = _held()
    with subject.begun() as (env, _):
        env.close()
        gc.collect()
        after = _held()
        env.close()
    for what, count in before.items():
        if after[what] > count:
            yield f"after close() there are {after[what] - count} more {what} than before"


def _left() -> tuple[int, dict[str, int]]:
    """Resident bytes of this process, and what else it holds, without what waits to be collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), _held()


def _held() -> dict[str, int]:
    """What a closed env must not hold on to."""
    children = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel does not say
            children += len((task / "children").read_text().split())
    return {
        "threads": threading.active_count(),
        "child processes": children,
        "open files": len(os.listdir("/proc/self/fd")),
    }


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "resize": resize,
        "refusals": refusals,
        "split": split,
        "carried": carried,
        "instances": instances,
        "leaks": leaks,
        "close": close,
    }
)
"""These rules by name."""
