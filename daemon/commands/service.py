"""``rallypoint service stop|sweep``: what the systemd unit runs around the end of a supervisor.

systemd ends a service for a restart as it does for a stop; which of them it is stands in its list of
jobs. For a restart the workers are left to the next supervisor, for a stop none may be left.
"""

import argparse
import os
import subprocess
import sys
from typing import Final

from rallypoint.daemon.commands.client import NoSupervisorError, add_dir
from rallypoint.daemon.commands.stop import ask_and_wait
from rallypoint.daemon.executors import processes
from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.daemon.shared.rundir import RunDir

_SYSTEMCTL_S: Final = 10.0
_STAYS: Final = ("restart", "start", "try-restart", "reload-or-start")
"""Jobs of systemd after which the unit runs."""
_ORDERLY: Final = ("success", "timeout")
"""``$SERVICE_RESULT`` of a stop; anything else is a crash, after which systemd starts the unit again."""


class ServiceManagerError(RallypointError):
    """systemd could not be asked."""


class ServiceCommand:
    """Not for people: the unit's ExecStop= and ExecStopPost=."""

    help: Final = "for the systemd unit: leave workers to a restart, sweep them after a stop"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        parser.add_argument("step", choices=("stop", "sweep"))
        parser.add_argument("unit", help="name of the unit, %%n")
        add_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        """0; `ServiceManagerError` when systemd cannot be asked."""
        job = pending_job(args.unit)
        if args.step == "stop":
            if job not in _STAYS:
                return 0  # SIGTERM follows: the node drains
            print(f"rallypoint: {args.unit} restarts: its workers train on", file=sys.stderr)
            return _leave_workers(args)
        if job in _STAYS or (job != "stop" and os.environ.get("SERVICE_RESULT") not in _ORDERLY):
            return 0  # the next supervisor adopts what lives
        for process in processes.end_earlier(RunDir(args.dir)):
            print(f"rallypoint: ended worker {process.key}, pid {process.pid}", file=sys.stderr)
        return 0


def _leave_workers(args: argparse.Namespace) -> int:
    """A supervisor that does not answer is ended by systemd, with the same result."""
    try:
        code: int = ask_and_wait(args, command="detach")["exited"]
    except NoSupervisorError as error:
        print(f"rallypoint: {error}", file=sys.stderr)
        return 0
    return code


def pending_job(unit: str) -> str:
    """What systemd is about to do with a unit: start, stop, restart, … or "" for nothing.

    Raises `ServiceManagerError`.
    """
    command = ["systemctl", "list-jobs", "--no-legend", "--plain", unit]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SYSTEMCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceManagerError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise ServiceManagerError(f"{' '.join(command)}: {done.stderr.strip()}")
    rows = [line.split() for line in done.stdout.splitlines()]
    return next((row[2] for row in rows if len(row) > 2 and row[1] == unit), "")


SERVICE = ServiceCommand()
