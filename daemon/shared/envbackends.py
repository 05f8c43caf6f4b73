"""What ``env.backend`` may name, without loading any of it."""

import importlib.metadata
from types import MappingProxyType
from typing import Final

from rallypoint.daemon.shared.errors import ConfigError

EMBEDDED: Final = "embedded"
"""The backend whose tasks have names and overrides in `rallypoint.daemon.shared.tasks`."""
BACKENDS: Final = MappingProxyType(
    {
        EMBEDDED: "rallypoint.trainer.envs.factory:embedded",
        "gymnasium": "rallypoint.trainer.envs.gymnasium:make",
        "isaaclab": "rallypoint.trainer.envs.simulators.isaaclab:isaaclab",
        "mjlab": "rallypoint.trainer.envs.simulators.mjlab:mjlab",
    }
)
"""Backends of this project, as ``module:factory``; a module is imported when it is asked for."""
ENTRY_POINTS: Final = "rallypoint.envs"
"""Group of entry points in which other distributions offer backends, by name."""


def place_of(name: str) -> tuple[str, str]:
    """Module and factory that ``name`` stands for: one of `BACKENDS`, an entry point of the group
    `ENTRY_POINTS`, or ``module:factory``. Raises `ConfigError` when it is none of these."""
    place = BACKENDS.get(name, name)
    offered: dict[str, str] = {}
    if ":" not in place:
        found = importlib.metadata.entry_points(group=ENTRY_POINTS)
        offered = {point.name: point.value for point in found}
        place = offered.get(name, name)
    module, _, factory = place.partition(":")
    if not module or not factory:
        known = ", ".join(repr(known) for known in sorted({*BACKENDS, *offered}))
        raise ConfigError(
            f"env.backend = {name!r} does not exist; choose one of {known}, or give module:factory"
        )
    return module, factory
