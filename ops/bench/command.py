"""``rallypoint bench recovery``: benchmarks of the product, each beside a peer in the same run."""

import argparse
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES
from rallypoint.ops.bench import peer, recovery, report
from rallypoint.ops.bench.job import Job
from rallypoint.ops.bench.recovery import Kill


@dataclass(frozen=True)
class BenchCommand:
    """Starts jobs of its own in a temporary directory, and ends them."""

    help: str = "measure recovery on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmarks and their arguments."""
        benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
        text = "kill workers at random moments; time from the kill to the survivors' next step"
        parts = benchmarks.add_parser("recovery", help=text, description=text)
        parts.add_argument("--workers", type=int, default=3, metavar="N")
        parts.add_argument("--kills", type=int, default=20, metavar="N")
        parts.add_argument("--task", default="quadruped-velocity", choices=sorted(TASK_OVERRIDES))
        parts.add_argument("--seed", type=int, default=1, help="of victims, moments and the job")
        parts.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                           dest="settings", help="a further setting of the job")  # fmt: skip
        parts.add_argument("--peer-kills", type=int, default=1, metavar="N",
                           help="kills under torchrun, each in a run of its own")  # fmt: skip
        parts.add_argument("--no-peer", action="store_true", help="leave torchrun out")
        parts.add_argument("--json", action="store_true", help="print JSON instead of the table")
        parts.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here")

    def run(self, args: argparse.Namespace) -> int:
        """0; 1 when a kill was not recovered from."""
        if args.workers < 2 or args.kills < 1:
            raise ConfigError(
                f"--workers {args.workers} --kills {args.kills}: at least 2 workers (somebody must "
                "survive) and 1 kill"
            )
        with tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as directory:
            document = _recovery(args, Path(directory))
        if args.output is not None:
            args.output.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document) if args.json else report.recovery_text(document))
        return 0 if document["recovered"] == args.kills else 1


def _recovery(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    settings = [f"env.task={args.task}", "job.iterations=none", f"job.seed={args.seed}"]
    numbers = itertools.count(1)

    def show(kill: Kill) -> None:
        if not args.json:
            print(report.kill_text(next(numbers), kill), flush=True)

    with Job(directory, args.workers, [*settings, *args.settings]) as job:
        outcome = recovery.measure(job, args.kills, args.seed, show)
    peers = [
        peer.measure(directory / f"peer-{number}", args.workers, args.seed + number)
        for number in range(0 if args.no_peer else args.peer_kills)
    ]
    about = {"workers": args.workers, "task": args.task, "seed": args.seed}
    return report.recovery_document(outcome, peers, {**about, "settings": args.settings})


COMMAND: Command = BenchCommand()
