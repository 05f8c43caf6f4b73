"""Loads what ``env.backend`` names."""

import importlib
import os
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

from rallypoint.daemon.shared.envbackends import place_of
from rallypoint.trainer.envs.base import Backend
from rallypoint.trainer.errors import EnvError


def find_backend(name: str) -> Backend:
    """The factory that ``name`` stands for. Raises `ConfigError` when it names nothing, `EnvError` when
    that cannot be imported."""
    module, attribute = place_of(name)
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a module of the user's own lies, as with python -m
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise EnvError(
            f"env.backend = {name!r}: {error}; give module:factory of a module that this Python can import "
            "(from the working directory, too)"
        ) from error
    if not callable(factory):
        raise EnvError(f"env.backend = {name!r}: {attribute} of {module} cannot be called")
    backend: Backend = factory
    return backend


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``env.overrides`` by name: each is ``name=value`` with a TOML value, else a string. Raises
    `EnvError` for one that has no such form."""
    found: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise EnvError(f"env.overrides: {text!r} should be name=value, such as 'frame_skip=5'")
        try:
            table = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            table = {}
        found[name.strip()] = table["value"] if list(table) == ["value"] else value.strip()
    return found
