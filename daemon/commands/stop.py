"""``rallypoint stop``, ``drain`` and ``simulate-notice``: ask, and wait until the supervisor has ended."""

import argparse
import json
import sys
import time
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient, add_dir
from rallypoint.daemon.core.ending import EXIT_NOTICE

_WAIT_S: Final = 24 * 3600.0
"""A drain may wait for the end of a long iteration; the user may interrupt the wait at any time."""


class StopCommand:
    """The job stops: workers agree, commit a checkpoint, and leave."""

    help: Final = "stop a run: agree, checkpoint, exit"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        _add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        """The exit code of the supervisor."""
        return _shown(args, ask_and_wait(args, command="stop"))


class DrainCommand:
    """This node leaves the job; others train on."""

    help: Final = "let a node leave its job"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        _add_common(parser)
        parser.add_argument(
            "--deadline-s", type=float, metavar="S", help="leave by force when S seconds are over"
        )

    def run(self, args: argparse.Namespace) -> int:
        """The exit code of the supervisor."""
        return _shown(args, ask_and_wait(args, command="drain", deadline_s=args.deadline_s))


class DetachCommand:
    """The supervisor ends, its workers train on."""

    help: Final = "end the supervisor only; its workers train on, for the next one to take over"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        _add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        """The exit code of the supervisor."""
        return _shown(args, ask_and_wait(args, command="detach"))


class SimulateNoticeCommand:
    """A drill: the node does what it would do on a real notice, and ends."""

    help: Final = "drill: let a node leave as on a preemption notice"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        _add_common(parser)
        parser.add_argument(
            "--in-s",
            type=float,
            metavar="S",
            required=True,
            help="the machine goes in S seconds, so the notice says",
        )

    def run(self, args: argparse.Namespace) -> int:
        """0 when the node left on the notice inside the deadline, else 1."""
        begun_s = time.monotonic()
        end = ask_and_wait(args, command="notice", deadline_s=args.in_s)
        took_s = time.monotonic() - begun_s
        passed = end["exited"] == EXIT_NOTICE and took_s <= args.in_s
        verdict = f"left {took_s:.2f} s after a notice of {args.in_s:g} s"
        if not passed:
            verdict += f": too late, or not for the notice (exit code {end['exited']})"
        document = {**end, "seconds": round(took_s, 3), "passed": passed}
        print(json.dumps(document) if args.json else f"{end['reason']}\n{verdict}")
        return 0 if passed else 1


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_dir(parser)
    parser.add_argument("--json", action="store_true", help="print how it ended as one JSON object")


def ask_and_wait(args: argparse.Namespace, **request: Any) -> dict[str, Any]:
    """Ask the supervisor of ``args.dir`` to end, and wait for that. How the supervisor ended: ``exited`` (its exit code) and ``reason``."""
    with AdminClient(args.dir) as client:
        client.ask(**request)
        end = client.wait_for_end(_WAIT_S)
    if end is not None:
        return end
    text = f"the supervisor in {args.dir} went away without saying how it ended; its log says more"
    print(f"rallypoint: {text}", file=sys.stderr)
    return {"exited": 1, "reason": text}


def _shown(args: argparse.Namespace, end: dict[str, Any]) -> int:
    print(json.dumps(end) if args.json else end["reason"])
    code: int = end["exited"]
    return code


DETACH = DetachCommand()
STOP = StopCommand()
DRAIN = DrainCommand()
SIMULATE_NOTICE = SimulateNoticeCommand()
