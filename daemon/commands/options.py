"""Options that more than one command takes, and the configuration that they make."""

import argparse
import os
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.configload import Given, Resolved, from_text, load, parse_assignment

_SHORT: Final = {
    "job": "job.name",
    "profile": "job.profile",
    "workers": "node.workers",
    "iterations": "job.iterations",
    "metrics_port": "metrics.port",
    "warm_start": "job.warm_start",
}


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """The job file and everything that overrides it."""
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="JOB.toml", help="configuration; none is needed"
    )
    parser.add_argument("--job", metavar="NAME", help="short for --set job.name=NAME")
    parser.add_argument(
        "--profile",
        metavar="P",
        help="sonic or rsl_rl: whose choices are the defaults (job.profile)",
    )
    parser.add_argument("--workers", metavar="N", help="short for --set node.workers=N")
    parser.add_argument(
        "--iterations", metavar="K", help="stop after iteration K (short for job.iterations)"
    )
    parser.add_argument(
        "--metrics-port", metavar="P", help="port of /metrics; 0 picks a free one (metrics.port)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="set section.key to a TOML value, else a string; may be repeated",
    )


def resolve(args: argparse.Namespace) -> Resolved:
    """The configuration of these arguments, this environment and the file. Raises `ConfigError`."""
    given: list[Given] = [parse_assignment(text) for text in args.assignments]
    for option, path in _SHORT.items():
        text = getattr(args, option, None)
        if text is not None:
            given.append(from_text(path, text, f"--{option.replace('_', '-')}"))
    return load(args.file, command_line=given, environ=os.environ)
