"""Subcommands, called in this process."""

import argparse

from rallypoint.daemon.shared.command import Command


def run_command(command: Command, *arguments: str) -> int:
    """Parse the arguments as the command line does, and run; the exit code."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(arguments))
