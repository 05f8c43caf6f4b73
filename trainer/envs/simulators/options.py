"""What ``env.overrides`` says to Isaac Lab and mjlab: a few names of ours, and paths in the task's own
configuration."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rallypoint.trainer.envs.base import EnvRequest
from rallypoint.trainer.errors import EnvError

LAUNCH_TIMEOUT_S: Final = 600.0
"""Longest that a stage of the start may take, waiting for others included."""
_GROUPS: Final = "obs_groups."


@dataclass(frozen=True)
class Options:
    """``env.overrides``, sorted out."""

    launch_timeout_s: float
    obs_groups: Mapping[str, tuple[str, ...]]
    """Groups of ours (``actor``, ``critic``) -> groups of the simulator, which are joined."""
    settings: Mapping[str, Any]
    """All others: paths in the configuration of the task."""


def sort_out(overrides: Mapping[str, Any]) -> Options:
    """Raises `EnvError` for a value of the wrong kind."""
    settings = dict(overrides)
    timeout_s = settings.pop("launch_timeout_s", LAUNCH_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise EnvError(
            f"env.overrides: launch_timeout_s = {timeout_s!r} should be a number of seconds above 0"
        )
    groups: dict[str, tuple[str, ...]] = {}
    for path in [path for path in settings if path.startswith(_GROUPS)]:
        name, value = path.removeprefix(_GROUPS), settings.pop(path)
        names = isinstance(value, list) and value and all(isinstance(x, str) for x in value)
        if name not in ("actor", "critic") or not names:
            raise EnvError(
                f"env.overrides: {path} = {value!r} should be obs_groups.actor or obs_groups.critic, "
                'with names of observation groups, such as obs_groups.critic=["policy", "privileged"]'
            )
        groups[name] = tuple(value)
    return Options(float(timeout_s), groups, settings)


def build_seed(request: EnvRequest) -> int:
    """The seed of a simulation, below 2^31, for what it draws once when it is built: another one in each
    process of a job, and the same in the process that takes a place over."""
    return (request.seed + zlib.crc32(request.process.encode())) % 2**31


def set_path(task: str, root: Any, path: str, value: Any) -> None:
    """Set one value in a configuration of nested objects and mappings. A list takes the kind of what
    stood there. Raises `EnvError` for a path that is not there, naming what is."""
    *way, last = path.split(".")
    node = root
    for name in way:
        _check_there(task, node, name, path)
        node = node[name] if isinstance(node, Mapping) else getattr(node, name)
    _check_there(task, node, last, path)
    if isinstance(node, dict):
        node[last] = value
        return
    if isinstance(getattr(node, last), tuple) and isinstance(value, list):
        value = tuple(value)
    setattr(node, last, value)


def _check_there(task: str, node: Any, name: str, path: str) -> None:
    names = node if isinstance(node, Mapping) else [n for n in dir(node) if not n.startswith("_")]
    if name not in names:
        there = ", ".join(sorted(map(str, names))[:40]) or "nothing"
        raise EnvError(
            f"env.overrides: {path!r}: the configuration of {task} has no {name!r} there; it has {there}"
        )


def choose_groups(
    task: str, given: Mapping[str, tuple[str, ...]], there: Sequence[str], actor: str
) -> dict[str, tuple[str, ...]]:
    """Which groups of the simulator make ours: as given, else ``actor`` and, where it is there,
    ``critic``. Raises `EnvError` for a group that the task does not have."""
    chosen: dict[str, tuple[str, ...]] = {"actor": (actor,)}
    if "critic" in there:
        chosen["critic"] = ("critic",)
    chosen |= given
    missing = sorted({group for groups in chosen.values() for group in groups} - set(there))
    if missing:
        raise EnvError(
            f"{task} has no observation group {', '.join(missing)}; it has {', '.join(there)}: say "
            "which to take, such as env.overrides = ['obs_groups.actor=[\"policy\"]']"
        )
    return chosen


def joined(groups: Mapping[str, tuple[str, ...]], obs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our groups, ``[N, D]``, of the simulator's, whose terms may be tensors of any shape or nested."""
    return {name: torch.cat([_flat(obs[g]) for g in of], dim=1) for name, of in groups.items()}


def said_of_ends(names: Sequence[str], log: Mapping[str, Any], ended: Tensor) -> dict[str, Tensor]:
    """`StepResult.endings` of a simulator that says means over all episodes that a step ended, and keeps
    them, stale, in later steps: they count in rows that ended alone. Nothing waits for the device."""
    zero = torch.zeros(ended.shape, dtype=torch.float64, device=ended.device)
    return {
        name: torch.where(
            ended, torch.as_tensor(log.get(name, 0.0), dtype=zero.dtype, device=zero.device), zero
        )
        for name in names
    }


def _flat(values: Any) -> Tensor:
    if isinstance(values, Mapping):
        return torch.cat([_flat(value) for value in values.values()], dim=1)
    flat: Tensor = values.flatten(1) if values.dim() > 1 else values[:, None]
    return flat
