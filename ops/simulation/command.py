"""``rallypoint simulate``: whole clusters under seeded faults, in virtual time."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.simulation import running
from rallypoint.ops.simulation.mutants import MUTANTS
from rallypoint.ops.simulation.running import Asked, Outcome
from rallypoint.ops.simulation.scenario import FAULTS

_SHOWN: Final = 20
"""So many failed seeds are told about in full; of others only the number is printed."""
_COUNTED: Final = ("seeds", "steps", "generations", "iterations")
_PROGRESS_S: Final = 10.0
_INTERRUPTED: Final = 130


@dataclass(frozen=True)
class SimulateCommand:
    """Starts nothing and touches nothing: all of it is in memory."""

    help: str = "run the membership decisions against seeded faults in virtual time"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many")
        text = "begin with this one: how a long run goes on that was interrupted"
        parser.add_argument("--first-seed", type=int, default=0, metavar="S", help=text)
        text = "nodes of every cluster; left out: 2 to 20, as each seed says"
        parser.add_argument("--nodes", type=int, metavar="K", help=text)
        text = "take only these faults, separated by commas: " + ", ".join(FAULTS)
        parser.add_argument("--faults", metavar="NAMES", help=text)
        text = "leave one rule out of the decisions, to see that this is found: " + ", ".join(
            MUTANTS
        )
        parser.add_argument("--mutant", metavar="NAME", help=text)
        text = "processes; left out: one for each CPU"
        parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="P", help=text)
        text = "print everything that happens in the first seed, and run only that"
        parser.add_argument("--trace", action="store_true", help=text)
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, args: argparse.Namespace) -> int:
        """0 when every invariant held in every seed, 1 when not, 130 when it was interrupted."""
        asked = _asked(args)
        if args.trace:
            outcome = running.run(args.first_seed, asked, print)
            print(outcome.message or "every invariant held")
            return 1 if outcome.violation else 0
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        tally, interrupted = Tally(seeds, _replay(args)), False
        try:
            for outcome in running.run_many(seeds, asked, args.jobs):
                tally.take(outcome)
                if outcome.violation and not args.json and len(tally.bad) <= _SHOWN:
                    print(f"{outcome.message}\n  {tally.replay} {outcome.seed}", flush=True)
                tally.tell_progress()
        except KeyboardInterrupt:
            interrupted = True
        print(json.dumps(tally.document()) if args.json else tally.text())
        if interrupted:
            rest = f"--first-seed {tally.next_seed} --seeds {seeds.stop - tally.next_seed}"
            print(f"interrupted; the rest: {rest}", file=sys.stderr)
            return _INTERRUPTED
        return 1 if tally.bad else 0


@dataclass
class Tally:
    """What has come of the seeds so far; they come in their order. ``replay`` and a seed: the command
    that runs that one again."""

    seeds: range
    replay: str
    bad: list[Outcome] = field(default_factory=list)
    total: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    began_s: float = field(default_factory=time.monotonic)
    told_s: float = field(default_factory=time.monotonic)

    @property
    def next_seed(self) -> int:
        """The first seed that has not been run."""
        return self.seeds.start + self.total["seeds"]

    def take(self, outcome: Outcome) -> None:
        """Count the next seed."""
        self.total.update(seeds=1, steps=outcome.steps, generations=outcome.generations)
        self.total.update(iterations=outcome.iterations)
        self.faults.update(outcome.faults)
        if outcome.violation:
            self.bad.append(outcome)

    def tell_progress(self) -> None:
        """One line to standard error, now and then."""
        now = time.monotonic()
        if now - self.told_s < _PROGRESS_S:
            return
        self.told_s = now
        done, rate = self.total["seeds"], self.total["seeds"] / (now - self.began_s)
        left_s = (len(self.seeds) - done) / rate
        text = f"{done} of {len(self.seeds)} seeds, {len(self.bad)} failed, {rate:.1f}/s"
        text += f", {left_s:.0f} s left; next seed {self.next_seed}"
        print(text, file=sys.stderr, flush=True)

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            **{name: self.total[name] for name in _COUNTED},
            "seconds": round(time.monotonic() - self.began_s, 1),
            "faults": dict(sorted(self.faults.items())),
            "violations": dict(Counter(outcome.violation for outcome in self.bad)),
            "failed_seeds": [outcome.seed for outcome in self.bad],
            "failed": [asdict(outcome) for outcome in self.bad[:_SHOWN]],
        }

    def text(self) -> str:
        """All of it in a few lines."""
        document = self.document()
        done = ", ".join(f"{name} {count}" for name, count in document["faults"].items())
        counts = ", ".join(f"{document[name]} {name}" for name in _COUNTED)
        lines = [f"{counts} in {document['seconds']} s", f"faults: {done}"]
        if not self.bad:
            return "\n".join([*lines, "every invariant held in every seed"])
        found = ", ".join(f"{name} {count}" for name, count in document["violations"].items())
        failed = " ".join(map(str, document["failed_seeds"]))
        lines += [f"violations: {found}", f"failed seeds: {failed}", f"replay one: {self.replay} S"]
        return "\n".join(lines)


def _replay(args: argparse.Namespace) -> str:
    """The command that runs one seed again, up to the number."""
    words = ["rallypoint simulate --trace"]
    given = ("nodes", "faults", "mutant")
    words += [f"--{n} {value}" for n in given if (value := getattr(args, n)) is not None]
    return " ".join([*words, "--first-seed"])


def _asked(args: argparse.Namespace) -> Asked:
    names = FAULTS if args.faults is None else tuple(args.faults.split(","))
    for kind, given, known in (
        ("--faults", names, FAULTS),
        ("--mutant", () if args.mutant is None else (args.mutant,), tuple(MUTANTS)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{kind} {', '.join(unknown)}: none of {', '.join(known)}")
    if min(args.seeds, args.jobs) < 1 or (args.nodes is not None and args.nodes < 1):
        raise ConfigError("--seeds, --jobs and --nodes must be at least 1")
    return Asked(args.nodes, names, args.mutant)


COMMAND: Command = SimulateCommand()
