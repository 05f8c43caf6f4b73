"""``rallypoint simulate``: whole clusters under seeded faults, in virtual time."""

import argparse
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.simulation import running
from rallypoint.ops.simulation.mutants import MUTANTS
from rallypoint.ops.simulation.running import Asked, Outcome
from rallypoint.ops.simulation.scenario import FAULTS

_SHOWN = 20
_COUNTED = ("seeds", "steps", "generations", "iterations")


@dataclass(frozen=True)
class SimulateCommand:
    """Starts nothing and touches nothing: all of it is in memory."""

    help: str = "run the membership decisions against seeded faults in virtual time"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many")
        parser.add_argument("--first-seed", type=int, default=0, metavar="S")
        text = "nodes of every cluster; left out: 2 to 20, as each seed says"
        parser.add_argument("--nodes", type=int, metavar="K", help=text)
        text = "take only these faults, separated by commas: " + ", ".join(FAULTS)
        parser.add_argument("--faults", metavar="NAMES", help=text)
        text = "leave one rule out of the decisions, to see that this is found: " + ", ".join(
            MUTANTS
        )
        parser.add_argument("--mutant", metavar="NAME", help=text)
        parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="P")
        text = "print everything that happens in the first seed, and run only that"
        parser.add_argument("--trace", action="store_true", help=text)
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, args: argparse.Namespace) -> int:
        """0 when every invariant held in every seed, else 1."""
        asked = _asked(args)
        if args.trace:
            outcome = running.run(args.first_seed, asked, print)
            print(outcome.message or "every invariant held")
            return 1 if outcome.violation else 0
        began_s = time.monotonic()
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        bad: list[Outcome] = []
        total: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        for outcome in running.run_many(seeds, asked, args.processes):
            total.update(seeds=1, steps=outcome.steps, generations=outcome.generations)
            total.update(iterations=outcome.iterations)
            faults.update(outcome.faults)
            if outcome.violation:
                bad.append(outcome)
                if not args.json and len(bad) <= _SHOWN:
                    print(f"seed {outcome.seed}: {outcome.message}", flush=True)
        document = {
            **total,
            "seconds": round(time.monotonic() - began_s, 1),
            "faults": dict(sorted(faults.items())),
            "violations": dict(Counter(outcome.violation for outcome in bad)),
            "failed": [asdict(o) for o in sorted(bad, key=lambda o: o.seed)[:_SHOWN]],
        }
        print(json.dumps(document) if args.json else _text(document, args))
        return 1 if bad else 0


def _asked(args: argparse.Namespace) -> Asked:
    names = FAULTS if args.faults is None else tuple(args.faults.split(","))
    for kind, given, known in (
        ("--faults", names, FAULTS),
        ("--mutant", () if args.mutant is None else (args.mutant,), tuple(MUTANTS)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{kind} {', '.join(unknown)}: none of {', '.join(known)}")
    if min(args.seeds, args.processes) < 1 or (args.nodes is not None and args.nodes < 1):
        raise ConfigError("--seeds, --processes and --nodes must be at least 1")
    return Asked(args.nodes, names, args.mutant)


def _text(document: dict[str, Any], args: argparse.Namespace) -> str:
    done = ", ".join(f"{name} {count}" for name, count in document["faults"].items())
    counts = ", ".join(f"{document[name]} {name}" for name in _COUNTED)
    lines = [f"{counts} in {document['seconds']} s", f"faults: {done}"]
    if document["violations"]:
        found = ", ".join(f"{name} {count}" for name, count in document["violations"].items())
        first = document["failed"][0]["seed"]
        lines.append(f"violations: {found}")
        lines.append(f"replay one: rallypoint simulate --trace --first-seed {first}")
    else:
        lines.append("every invariant held in every seed")
    return "\n".join(lines)


COMMAND: Command = SimulateCommand()
