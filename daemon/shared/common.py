"""Values that hold for a whole job, whichever of its nodes reads them, while it runs.

Those that decide what is trained stand for as long as the job lives (`configload.agreed`). These may be
others each time the job is started anew: how far it goes, how many workers it wants, its timings, where
its checkpoints are. The first node brings them into the job's record; every other one must have the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import items, shown

COMMON: Final = (
    "job.iterations",
    "job.env_steps",
    "job.min_workers",
    "job.max_workers",
    "job.spares",
    "membership.detect_s",
    "membership.hang_s",
    "membership.join_debounce_s",
    "membership.orphan_grace_s",
    "checkpoint.url",
    "checkpoint.every_iterations",
    "checkpoint.every_s",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "checkpoint.keep_best_metric",
    "checkpoint.keep_best_order",
    "checkpoint.env_rows",
)
"""Their keys. Beside them: whether workers have GPUs, since that decides how they talk to each other."""

DEVICES: Final = "node.devices"
GPUS: Final = "GPUs"


def common(config: Config) -> dict[str, Any]:
    """The values of this configuration by ``section.key``, as JSON gives them back. ``node.devices`` is
    None (CPU) or `GPUS`: which ones is each node's own matter."""
    values = {path: value for path, value in items(config) if path in COMMON}
    values[DEVICES] = None if config.node.devices is None else GPUS
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return plain


def differences_in_words(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs between two sets of values, key by key."""
    keys = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
    return ", ".join(f"{k}: {shown(k, old.get(k))} -> {shown(k, new.get(k))}" for k in keys)


def with_common(config: Config, values: Mapping[str, Any]) -> Config:
    """This configuration with the values of the job's record."""
    for path in COMMON:
        if path in values:
            section, _, key = path.partition(".")
            part = replace(getattr(config, section), **{key: values[path]})
            config = replace(config, **{section: part})
    return config
