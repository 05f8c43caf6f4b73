"""What a subcommand of ``rallypoint`` is, wherever it lives."""

import argparse
from typing import Protocol


class Command(Protocol):
    """One subcommand. Those of the trainer, checkpointing and ops folders are found through the
    entry-point group ``rallypoint.commands`` and loaded only when they are asked for."""

    @property
    def help(self) -> str:
        """One line for ``rallypoint --help``."""
        ...

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code. A `RallypointError` becomes one line and exit code 1, a
        `ConfigError` exit code 2."""
        ...
