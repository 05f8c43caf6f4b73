"""Loading the configuration: merge, check, and say where each value came from.

Precedence: command line > environment ``RALLYPOINT_<SECTION>__<KEY>`` > TOML file > overrides of the
task > profile > defaults. A value on the command line or in the environment is a TOML value, else a string;
``none`` stands for "not set" wherever a key may be unset (TOML has no null).
"""

import difflib
import hashlib
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final

import msgspec

from rallypoint.daemon.shared import configchecks, envbudget, failpoints, storecheck, timeouts
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.envbackends import EMBEDDED
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.profiles import PROFILES
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES

ENVIRONMENT_PREFIX: Final = "RALLYPOINT_"
EXEMPT_VARIABLES: Final = frozenset({failpoints.VARIABLE, failpoints.LOG_VARIABLE})
"""Variables with the prefix that are no configuration."""

AGREED: Final = ("job.seed", "env", "ppo", "sampler", "aux", "distill")
"""Keys and sections that all workers of a job must have in common for as long as it lives."""

RECORDED: Final = ("job", "env", "ppo", "sampler", "aux", "distill")
"""Sections that a checkpoint and the journal hold: what a policy is made by."""

_SECRET: Final[frozenset[str]] = frozenset()
"""Keys whose value is never shown; none exist yet."""

_ABOVE_ZERO: Final = frozenset(
    {"ppo.max_grad_norm", "ppo.normaliser_clip", "ppo.desired_kl", "ppo.init_std"}
)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "job.seed": (0, 2**56 - 1),
        "job.iterations": (0, math.inf),
        "job.env_steps": (0, math.inf),
        "node.workers": (1, 1024),
        "node.stop_grace_s": (0, math.inf),
        "membership.detect_s": (0.1, math.inf),
        "membership.hang_s": (0.5, math.inf),
        "membership.join_debounce_s": (0, math.inf),
        "membership.orphan_grace_s": (0, math.inf),
        "membership.quarantine_after": (1, math.inf),
        "membership.quarantine_cooldown_s": (0, math.inf),
        "env.num_envs": (1, math.inf),
        "env.max_envs": (1, math.inf),
        "ppo.rollout_steps": (1, math.inf),
        "ppo.epochs": (1, math.inf),
        "ppo.mini_batches": (1, math.inf),
        "ppo.micro_batches": (1, math.inf),
        "ppo.gamma": (0, 1),
        "ppo.lam": (0, 1),
        "ppo.advantage_ddof": (0, 1),
        "ppo.clip": (0, math.inf),
        "ppo.learning_rate": (0, math.inf),
        "ppo.value_coef": (0, math.inf),
        "ppo.normaliser_prior": (0, 1),
        "sampler.uniform": (0, 1),
        "sampler.cap_ratio": (1, math.inf),
        "sampler.alpha": (0, 1),
        "sampler.bin_cap": (0, 1),
        "sampler.clip_cap": (0, 1),
        "sampler.sonic_mean_every": (1, math.inf),
        "checkpoint.every_iterations": (1, math.inf),
        "checkpoint.keep_last": (1, math.inf),
        "checkpoint.keep_every": (1, math.inf),
        "checkpoint.keep_best": (0, math.inf),
        "checkpoint.local_every_iterations": (1, math.inf),
        "checkpoint.local_keep_last": (1, math.inf),
        "metrics.port": (0, 65535),
        "log.worker_file_bytes": (4096, math.inf),
        "log.worker_files": (1, math.inf),
    }
)


@dataclass(frozen=True)
class Resolved:
    """The merged configuration, and for each ``section.key`` where its value came from."""

    config: Config
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Given:
    """One value as somebody gave it."""

    path: str
    """``section.key``."""
    value: Any
    origin: str
    """Where it stands, for messages: ``--set``, ``environment RALLYPOINT_…``, the file."""
    text: str | None = None
    """What was typed, when ``value`` was parsed from text: taken where a string is expected."""


def schema() -> dict[str, dict[str, Any]]:
    """``section -> key -> type`` of every key."""
    return {
        section.name: typing.get_type_hints(typing.cast(type, section.type))
        for section in fields(Config)
    }


def parse_assignment(text: str) -> Given:
    """A ``--set section.key=value``. Raises `ConfigError` when it has no such form."""
    path, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: expected section.key=value, such as --set job.seed=2")
    return from_text(path.strip(), value, "--set")


def from_text(path: str, text: str, origin: str) -> Given:
    """A value that was typed: a TOML value, else a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        table = {}
    value = table["value"] if list(table) == ["value"] else text
    return Given(path, value, origin, text)


def load(
    file: Path | None = None,
    *,
    command_line: Sequence[Given] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Resolved:
    """Merge all sources and check the outcome.

    Raises `ConfigError` (exit code 2) for anything unknown, of the wrong type, out of range, not
    divisible (`BudgetError`) or wrongly nested; the message names the value, its origin and a remedy.
    """
    given = [*_from_file(file), *_from_environment(environ), *command_line]
    chosen: dict[str, Given] = {}
    for item in given:
        _check_known(item)
        chosen[item.path] = item
    known = {"job.profile": PROFILES}
    if "env.backend" not in chosen or chosen["env.backend"].value == EMBEDDED:
        known = {"env.task": TASK_OVERRIDES} | known  # a task ranks above the profile
    for key, sets in known.items():
        for path, value in _named_set(chosen, key, sets).items():
            chosen.setdefault(path, value)
    config = _build(chosen)
    configchecks.check(config)
    storecheck.check(config)
    envbudget.check(config)
    timeouts.derive(config, envbudget.world_size_range(config)[1])
    sources = {
        path: chosen[path].origin if path in chosen else "default" for path, _ in items(config)
    }
    return Resolved(config, MappingProxyType(sources))


def _named_set(
    chosen: Mapping[str, Given], key: str, sets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Given]:
    """The values that go with the chosen task or profile."""
    name = chosen[key].value if key in chosen else dict(items(Config()))[key]
    kind = key.partition(".")[2]
    if not isinstance(name, str) or name not in sets:
        raise ConfigError(
            f"{key} = {name!r} (from {chosen[key].origin}): no {kind} has this name; "
            f"there are {', '.join(sorted(sets))}"
        )
    return {path: Given(path, value, f"{kind} {name}") for path, value in sets[name].items()}


def is_name(text: str) -> bool:
    """Whether a job or a node can be called this."""
    return _NAME.fullmatch(text) is not None


def items(config: Config) -> Iterable[tuple[str, Any]]:
    """``("section.key", value)`` of every key, in the order of the schema."""
    for section in fields(config):
        values = getattr(config, section.name)
        for key in fields(values):
            yield f"{section.name}.{key.name}", getattr(values, key.name)


def shown(path: str, value: Any) -> str:
    """A value as ``rallypoint config`` prints it: in TOML where TOML can say it, secrets masked."""
    if path in _SECRET and value is not None:
        return '"********"'
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(shown('', part) for part in value)}]"
    return msgspec.json.encode(value).decode()


def agreed(config: Config) -> dict[str, Any]:
    """The values that all workers of the job must have in common, by ``section.key``."""
    return {
        path: value
        for path, value in items(config)
        if path in AGREED or path.partition(".")[0] in AGREED
    }


def config_hash(config: Config) -> str:
    """16 hex digits over `agreed`: equal for workers that may train together."""
    canonical = msgspec.json.encode(agreed(config), order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:16]


def to_json(config: Config) -> bytes:
    """The form of ``DIR/config.json``, which workers read."""
    return msgspec.json.format(msgspec.json.encode(config))


def from_json(data: bytes) -> Config:
    """Raises `ConfigError` when ``data`` is not what `to_json` wrote."""
    try:
        return msgspec.json.decode(data, type=Config)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"config.json is not a configuration of this version: {error}") from error


# --- sources ----------------------------------------------------------------------------------


def _from_file(file: Path | None) -> list[Given]:
    if file is None:
        return []
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}; give the job's TOML file, or none for the defaults"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    given = []
    for section, table in tables.items():
        if section not in schema():
            raise ConfigError(f"unknown section [{section}] in {file}{_nearest(section, schema())}")
        if not isinstance(table, dict):
            raise ConfigError(
                f"{file}: {section} = {table!r} stands outside a section; write it as "
                f"key = value below [{section}]"
            )
        given += [Given(f"{section}.{key}", value, str(file)) for key, value in table.items()]
    return given


def _from_environment(environ: Mapping[str, str]) -> list[Given]:
    given = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in EXEMPT_VARIABLES:
            continue
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        path = f"{section}.{key}" if key else section
        given.append(from_text(path, environ[name], f"environment variable {name}"))
    return given


def _check_known(item: Given) -> None:
    sections = schema()
    section, dot, key = item.path.partition(".")
    if section in sections and key in sections[section]:
        return
    every = [f"{name}.{key}" for name, keys in sections.items() for key in keys]
    if not dot or section in sections:
        what, near = f"unknown key {item.path!r}", _nearest(item.path, every)
    else:
        what, near = f"unknown section {section!r} of key {item.path!r}", _nearest(item.path, every)
    raise ConfigError(f"{what} (from {item.origin}){near}")


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    by_key = [path for path in known if path.partition(".")[2] == name.rpartition(".")[2]]
    close = by_key or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; `rallypoint config` lists every key"


# --- checks -----------------------------------------------------------------------------------


def _build(chosen: Mapping[str, Given]) -> Config:
    sections: dict[str, Any] = {}
    for name, keys in schema().items():
        values = {
            key: _convert(chosen[f"{name}.{key}"], kind)
            for key, kind in keys.items()
            if f"{name}.{key}" in chosen
        }
        section = next(f for f in fields(Config) if f.name == name)
        sections[name] = typing.cast(type, section.type)(**values)
    config = Config(**sections)
    for path, value in items(config):
        _check_value(path, value, chosen.get(path))
    return config


def _convert(item: Given, kind: Any) -> Any:
    if item.value == "none" and NoneType in typing.get_args(kind):
        return None
    try:
        return msgspec.convert(item.value, kind)
    except msgspec.ValidationError:
        if item.text is not None and item.text != item.value:
            try:
                return msgspec.convert(item.text, kind)
            except msgspec.ValidationError:
                pass  # neither reading fits: say so about the parsed one
    raise ConfigError(
        f"{item.path} = {item.value!r} (from {item.origin}): expected {_type_name(kind)}"
    )


def _type_name(kind: Any) -> str:
    if kind is NoneType:
        return '"none"'
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if typing.get_origin(inner[0]) is typing.Literal:
            return f"a list of {_type_name(inner[0])}"
        one = _type_name(inner[0]).split()[-1] + "s"
        return f"a list of {one}" if Ellipsis in inner else f"a list of {len(inner)} {one}"
    if arguments := typing.get_args(kind):
        return " or ".join(_type_name(argument) for argument in arguments)
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names[kind]


def _check_value(path: str, value: Any, given: Given | None) -> None:
    origin = f" (from {given.origin})" if given else ""
    parts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
        raise ConfigError(f"{path} = {value}{origin}: must be finite")
    low, high = _BOUNDS.get(path, (-math.inf, math.inf))
    if value is not None and path in _BOUNDS and not low <= value <= high:
        bound = f"at least {low:g}" if value < low else f"at most {high:g}"
        raise ConfigError(f"{path} = {value}{origin}: must be {bound}")
    if path in ("ppo.learning_rate_bounds", "ppo.std_bounds") and not 0 < value[0] <= value[1]:
        raise ConfigError(
            f"{path} = {value}{origin}: both must be above 0, and the second not below the first"
        )
    if path in _ABOVE_ZERO and value is not None and value <= 0:
        off = "" if path == "ppo.init_std" else "; none switches it off"
        raise ConfigError(f"{path} = {value}{origin}: must be above 0{off}")
    if (
        path in ("ppo.hidden", "ppo.critic_hidden")
        and value is not None
        and min(value, default=0) < 1
    ):
        raise ConfigError(
            f"{path} = {value}{origin}: at least one layer is needed, each with a width of at least 1"
        )
    if path in ("job.name", "node.name") and not is_name(value):
        raise ConfigError(
            f"{path} = {value!r}{origin}: must start with a letter or digit and hold only letters, "
            "digits, dot, dash and underscore, at most 63; it is part of paths and of store keys"
        )
