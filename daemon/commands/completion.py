"""``rallypoint completion SHELL``: a script with which the shell completes commands and options."""

import argparse
from typing import Any, Final

import shtab

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_FILES: Final = ("FILE", "JOB.toml", "JOURNAL", "CHECKPOINT")


class CompletionCommand:
    """Loads every command, those of other folders too: their options are in the script."""

    help: Final = "print a script that completes commands and options in a shell"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        parser.add_argument("shell", choices=SHELLS, help="for which shell")

    def run(self, args: argparse.Namespace) -> int:
        """Print; exit code 0."""
        from rallypoint.daemon.cli import full_parser  # which loads this module, if it is asked for

        parser = full_parser()
        _complete_paths(parser)
        print(shtab.complete(parser, args.shell))
        return 0


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Say which arguments are directories and files, here and in all subcommands."""
    for action in parser._actions:
        told: Any = action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_paths(subparser)
        elif action.metavar == "DIR":
            told.complete = shtab.DIRECTORY
        elif action.metavar in _FILES:
            told.complete = shtab.FILE


COMMAND = CompletionCommand()
