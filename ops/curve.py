"""The reward curve of a run as a picture: ``python -m rallypoint.ops.curve DIR``.

Reads ``DIR/journal.jsonl`` and writes ``DIR/curve.png``. Iterations that a restore has wound back
are shown as they were trained in the end; vertical lines mark changes of membership.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.daemon.shared.rundir import RunDir

RETURN: Final = "episode_return_mean"
REWARD: Final = "reward_mean"


class NoCurveError(RallypointError):
    """The journal holds nothing that could be drawn."""


@dataclass
class Curve:
    """What is drawn, over env steps."""

    env_steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    figure: str = RETURN
    changes: list[tuple[int, str]] = field(default_factory=list)
    """(env steps, cause) of each change of membership after the first."""


def committed(
    lines: Iterable[str],
) -> tuple[dict[int, dict[str, Any]], list[tuple[int, str]]]:
    """What a journal says of each iteration as it was trained in the end, by number; and (iteration,
    cause) of each change of membership."""
    iterations: dict[int, dict[str, Any]] = {}
    changes: list[tuple[int, str]] = []
    for text in lines:
        line = _parse(text)
        if line.get("event") == "generation":
            if line["restore"]:
                iterations = {i: e for i, e in iterations.items() if i <= line["iteration"]}
            changes.append((line["iteration"], line["cause"]))
        elif line.get("event") == "iteration":
            iterations[line["iteration"]] = line
    return {number: iterations[number] for number in sorted(iterations)}, changes


def read_curve(lines: Iterable[str]) -> Curve:
    """The curve of a journal. Raises `NoCurveError` when it has no iteration with a figure."""
    iterations, changes = committed(lines)
    figure = RETURN if any(RETURN in e["metrics"] for e in iterations.values()) else REWARD
    curve = Curve(figure=figure)
    for entry in iterations.values():
        if figure in entry["metrics"]:
            curve.env_steps.append(entry["env_steps_total"])
            curve.values.append(entry["metrics"][figure])
    if not curve.values:
        raise NoCurveError("the journal holds no committed iteration with a reward yet")
    steps = {number: entry["env_steps_total"] for number, entry in iterations.items()}
    curve.changes = [(steps.get(i, 0), cause) for i, cause in changes[1:]]
    return curve


def draw(curve: Curve, path: Path) -> None:
    """Write the picture as PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(curve.env_steps, curve.values, linewidth=1.5)
    for at, cause in curve.changes:
        forced = cause in ("worker_lost", "node_lost", "hang")
        axes.axvline(at, color="tab:red" if forced else "tab:gray", alpha=0.4, linewidth=1)
    axes.set_xlabel("env steps")
    axes.set_ylabel(curve.figure.replace("_", " "))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parse(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {}  # a line that a killed supervisor did not finish
    return line if isinstance(line, dict) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; prints the path of the picture. Exit code 1 when there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="rallypoint.ops.curve")
    parser.add_argument("dir", type=Path, metavar="DIR")
    rundir = RunDir(parser.parse_args(arguments).dir)
    try:
        with rundir.journal.open(encoding="utf-8") as lines:
            draw(read_curve(lines), rundir.curve)
    except (OSError, NoCurveError) as error:
        print(f"no curve: {error}", file=sys.stderr)
        return 1
    print(rundir.curve)
    return 0


if __name__ == "__main__":
    sys.exit(main())
