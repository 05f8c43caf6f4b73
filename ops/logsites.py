"""Where the supervisor logs, read from its code: the levels and fields of each event.

Facts are logged as ``_log.<level>("name", field=…)``. A decision says one as ``Explain("name", reason)``
or ``Wait("name", reason)``, which the executor logs with that reason.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "daemon"
LEVELS: Final = ("debug", "info", "warning", "error")
_SAID: Final = {"Explain", "Wait", "_ask_again"}


@dataclass(frozen=True)
class Site:
    """One place that logs."""

    event: str | None
    """None: a name that is passed on."""
    levels: tuple[str, ...]
    fields: tuple[str, ...]
    where: str
    """File and line, below the folder."""


def sites(folder: Path = FOLDER) -> Iterator[Site]:
    """Every place below a folder that logs an event."""
    for path in sorted(folder.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        aliases = _aliases(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and node.args:
                levels = _levels(node.func, aliases)
                if levels:
                    where = f"{path.relative_to(folder).as_posix()}:{node.lineno}"
                    yield Site(_name(node.args[0]), levels, _fields(node), where)


def _levels(function: ast.expr, aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    match function:
        case ast.Attribute(value=ast.Name(id="_log"), attr=level) if level in LEVELS:
            return (level,)
        case ast.Name(id=name) if name in _SAID:
            return ("info",)
        case ast.Name(id=name):
            return aliases.get(name, ())
        case _:
            return ()


def _aliases(module: ast.Module) -> dict[str, tuple[str, ...]]:
    """Of ``say = _log.info if … else _log.debug``."""
    found = {}
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(body=one, orelse=other)):
                levels = _levels(one, {}) + _levels(other, {})
                if levels:
                    found[name] = levels
            case _:
                pass
    return found


def _name(argument: ast.expr) -> str | None:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return None


def _fields(call: ast.Call) -> tuple[str, ...]:
    if isinstance(call.func, ast.Name) and call.func.id in _SAID:
        return ("reason",)
    return tuple("exception" if k.arg == "exc_info" else str(k.arg) for k in call.keywords)
