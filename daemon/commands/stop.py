"""``rallypoint stop`` and ``rallypoint drain``: ask, and wait until the supervisor has ended."""

import argparse
import sys
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient, add_dir

_WAIT_S: Final = 24 * 3600.0
"""A drain may wait for the end of a long iteration; the user may interrupt the wait at any time."""


class StopCommand:
    """The job stops: workers agree, commit a checkpoint, and leave."""

    help: Final = "stop a run: agree, checkpoint, exit"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        add_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        """The exit code of the supervisor."""
        return _ask_and_wait(args, command="stop")


class DrainCommand:
    """This node leaves the job; others train on."""

    help: Final = "let a node leave its job"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        add_dir(parser)
        parser.add_argument(
            "--deadline-s", type=float, metavar="S", help="leave by force when S seconds are over"
        )

    def run(self, args: argparse.Namespace) -> int:
        """The exit code of the supervisor."""
        return _ask_and_wait(args, command="drain", deadline_s=args.deadline_s)


def _ask_and_wait(args: argparse.Namespace, **request: Any) -> int:
    with AdminClient(args.dir) as client:
        client.ask(**request)
        end = client.wait_for_end(_WAIT_S)
    if end is None:
        print(
            f"rallypoint: the supervisor in {args.dir} went away without saying how it ended; its "
            "log says more",
            file=sys.stderr,
        )
        return 1
    print(end["reason"])
    code: int = end["exited"]
    return code


STOP = StopCommand()
DRAIN = DrainCommand()
