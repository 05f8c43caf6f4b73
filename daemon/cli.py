"""The command ``rallypoint``. Every subcommand is loaded only when it is asked for.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 no supervisor answers, 75 left on a
preemption notice.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final, NoReturn

from rallypoint import __version__
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError, RallypointError

_EXIT_INTERRUPTED: Final = 130
_GROUP: Final = "rallypoint.commands"
_COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "run": "rallypoint.daemon.commands.run:COMMAND",
        "status": "rallypoint.daemon.commands.status:COMMAND",
        "stop": "rallypoint.daemon.commands.stop:STOP",
        "drain": "rallypoint.daemon.commands.stop:DRAIN",
        "simulate-notice": "rallypoint.daemon.commands.stop:SIMULATE_NOTICE",
        "detach": "rallypoint.daemon.commands.stop:DETACH",
        "service": "rallypoint.daemon.commands.service:SERVICE",
        "events": "rallypoint.daemon.commands.history:COMMAND",
        "pause": "rallypoint.daemon.commands.wishes:PAUSE",
        "resume": "rallypoint.daemon.commands.wishes:RESUME",
        "scale": "rallypoint.daemon.commands.wishes:SCALE",
        "quarantine": "rallypoint.daemon.commands.quarantine:COMMAND",
        "completion": "rallypoint.daemon.commands.completion:COMMAND",
        "config": "rallypoint.daemon.commands.config:COMMAND",
    }
)
"""Commands of the daemon, as ``module:object``; those of other folders are entry points."""


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line too, with where to look, instead of the whole synopsis."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rallypoint: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Raises SystemExit for ``--help`` and wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    asked = next((word for word in given if not word.startswith("-")), None)
    parser = _program()
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command: Command | None = None
    of_command = parser
    for name, target in _targets(asked).items():
        if name == asked:
            command = _load(target)
            of_command = subparsers.add_parser(name, help=command.help)
            command.configure(of_command)
        elif asked is None and name in _COMMANDS:
            subparsers.add_parser(name, help=_load(target).help)
        else:
            subparsers.add_parser(name, help=f"see rallypoint {name} --help")
    args, unknown = parser.parse_known_args(given)
    if unknown:
        of_command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if command is None:
        parser.error(f"{asked!r} is no command")  # not reached: argparse refuses it before
    try:
        return command.run(args)
    except RallypointError as error:
        print(f"rallypoint: {error}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        print("rallypoint: interrupted; what was asked of a supervisor stands", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else its flush at exit fails too
        return 1
    except OSError as error:
        if asked == "run" or error.filename is None:
            raise  # of a whole supervisor the traceback is wanted
        remedy = "look at the path and its permissions"
        print(f"rallypoint: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr)
        return 1


def full_parser() -> argparse.ArgumentParser:
    """The parser with every command loaded and configured; costs what their modules cost to load."""
    parser = _program()
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, target in sorted(_targets(None).items()):
        command = _load(target)
        command.configure(subparsers.add_parser(name, help=command.help))
    return parser


def _program() -> _Parser:
    parser = _Parser(
        prog="rallypoint", description="Fault-tolerant elastic training for robot-learning RL."
    )
    parser.add_argument("--version", action="version", version=f"rallypoint {__version__}")
    return parser


def _exit_code(error: RallypointError) -> int:
    if isinstance(error, ConfigError):
        return 2
    code: int = getattr(error, "exit_code", 1)
    return code


def _targets(asked: str | None) -> dict[str, str]:
    """All commands by name; installed packages are searched only when that is needed."""
    if asked in _COMMANDS:
        return dict(_COMMANDS)
    return {**_COMMANDS, **{entry.name: entry.value for entry in entry_points(group=_GROUP)}}


def _load(target: str) -> Command:
    module, _, attribute = target.partition(":")
    command: Command = getattr(importlib.import_module(module), attribute)
    return command


if __name__ == "__main__":
    sys.exit(main())
