"""``rallypoint pause``, ``resume`` and ``scale``: planned changes of the whole job, asked of any node."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient, add_dir

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1

Status = dict[str, Any]


@dataclass(frozen=True)
class WishCommand:
    """Asks, and waits until the job is as it was asked for."""

    name: str
    help: str
    reached: Callable[[Status, argparse.Namespace], bool]

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        add_dir(parser)
        if self.name == "scale":
            parser.add_argument(
                "--workers",
                type=int,
                required=True,
                metavar="N",
                help="world size of the job, from job.min_workers to job.max_workers",
            )
        parser.add_argument(
            "--timeout-s",
            type=float,
            default=_TIMEOUT_S,
            metavar="S",
            help=f"wait no longer than this for it ({_TIMEOUT_S:g}); what was asked for stands",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """0 once it is so, 1 when that takes longer than the timeout."""
        begun_s = time.monotonic()
        with AdminClient(args.dir) as client:
            client.ask(command=self.name, workers=getattr(args, "workers", 0))
            status: Status = client.ask(command="status")["status"]
            while not (done := self.reached(status, args)):
                if time.monotonic() - begun_s > args.timeout_s:
                    break
                time.sleep(_POLL_S)
                status = client.ask(command="status")["status"]
        took_s = time.monotonic() - begun_s
        if args.json:
            shown = {key: status[key] for key in ("state", "reason", "generation", "world_size")}
            print(json.dumps({**shown, "seconds": round(took_s, 3), "done": done}))
        else:
            print(_text(status, took_s, done=done))
        return 0 if done else 1


def _text(status: Status, took_s: float, *, done: bool) -> str:
    now = f"the job is {status['state']} with {status['world_size']} workers"
    if done:
        return f"{now}, generation {status['generation']}, after {took_s:.1f} s"
    return (
        f"{now}; what was asked for stands, but did not come within {took_s:.0f} s: look at "
        "`rallypoint status`"
    )


def _waits(status: Status) -> bool:
    states = {w["state"] for w in status["workers"] if w["rank"] is not None}
    return states <= {"waiting"}


def _is_paused(status: Status, _: argparse.Namespace) -> bool:
    return status["state"] == "paused" and _waits(status)


def _is_resumed(status: Status, _: argparse.Namespace) -> bool:
    return status["state"] == "holding" or (status["state"] == "running" and not _waits(status))


def _is_scaled(status: Status, args: argparse.Namespace) -> bool:
    return bool(status["world_size"] == args.workers)


PAUSE = WishCommand(
    "pause", "let the workers of a job wait, warm, at the next safe point", _is_paused
)
RESUME = WishCommand("resume", "let a paused job go on", _is_resumed)
SCALE = WishCommand("scale", "change the number of workers of a job", _is_scaled)
