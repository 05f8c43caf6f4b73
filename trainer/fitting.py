"""Whether a checkpoint fits a job: what differs, tensor by tensor and key by key."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from torch import Tensor

from rallypoint.checkpointing.restore import LoadedCheckpoint
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.errors import CheckpointMismatch

FREE: Final = frozenset({"env.budget", "env.num_envs", "env.block", "env.max_envs", "env.backup"})
"""Keys that workers must have in common, but that a restored state does not depend on."""

FUNCTION: Final = frozenset(
    {
        "ppo.activation",
        "ppo.normalise_actor",
        "ppo.normalise_critic",
        "ppo.normaliser_form",
        "ppo.normaliser_clip",
        "ppo.std_clamp",
    }
)
"""Keys that say which function the parameters and statistics make; their shapes do not tell."""

_SHOWN: Final = 20
"""Differences that a message names; it counts the others."""


def agreed(path: str) -> bool:
    """Whether a resumed job must have the value of this key that its checkpoint was made with."""
    listed = path in configload.AGREED or path.partition(".")[0] in configload.AGREED
    return listed and path not in FREE


def require_fit(
    loaded: LoadedCheckpoint,
    live: Mapping[str, Tensor],
    config: Config,
    *,
    keys: Callable[[str], bool],
    names: Callable[[str], bool] = lambda name: True,
    dtypes: bool = True,
    remedy: str,
) -> None:
    """Raise `CheckpointMismatch` with every difference between a checkpoint and a job: the tensors that
    ``names`` selects of both, against the job's ``live`` ones, and the ``keys`` of the configuration.
    A key that the checkpoint does not have is younger than it, and no difference."""
    differing = [
        *_tensors(live, {n: t for n, t in loaded.tensors.items() if names(n)}, dtypes=dtypes),
        *_keys(loaded.manifest.config, config, keys),
    ]
    if not differing:
        return
    more = len(differing) - _SHOWN
    raise CheckpointMismatch(
        f"{loaded.info.path} does not fit this job ({len(differing)} differences): "
        + "; ".join(differing[:_SHOWN] + ([f"and {more} more"] if more > 0 else []))
        + f". {remedy}"
    )


def _tensors(live: Mapping[str, Tensor], found: Mapping[str, Tensor], *, dtypes: bool) -> list[str]:
    def shown(tensor: Tensor | None) -> str:
        if tensor is None:
            return "nothing"
        kind = f"{str(tensor.dtype).removeprefix('torch.')} " if dtypes else ""
        return f"{kind}{list(tensor.shape)}"

    names = sorted(live.keys() | found.keys())
    pairs = ((name, shown(found.get(name)), shown(live.get(name))) for name in names)
    return [
        f"{name}: {theirs} in it, {ours} here" for name, theirs, ours in pairs if theirs != ours
    ]


def _keys(theirs: Mapping[str, Any], config: Config, keys: Callable[[str], bool]) -> list[str]:
    """As `configload.items`, of the JSON values that a manifest holds."""
    ours: Mapping[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    differing = []
    for section, values in theirs.items():
        if not isinstance(values, dict):
            continue
        for key in sorted(values):
            path, here = f"{section}.{key}", ours.get(section, {}).get(key)
            if keys(path) and values[key] != here:
                differing.append(
                    f"{path}: {configload.shown(path, values[key])} in it, "
                    f"{configload.shown(path, here)} here"
                )
    return differing
