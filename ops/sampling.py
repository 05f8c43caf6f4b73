"""Where adaptive motion sampling went, as a picture: ``python -m rallypoint.ops.sampling DIR``.

Reads the newest checkpoint of a run and its journal, and writes ``DIR/sampling.png``: how often each bin of
each clip is drawn over how often by frames alone, and its failure rate; below, how the greatest of them
and the entropy went with env steps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.checkpointing.restore import LoadedCheckpoint, load_checkpoint
from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops.curve import committed
from rallypoint.trainer.envs.base import MotionLibrary
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.evaluate import configuration, restore_learner

GREATEST: Final = "adp_samp/max_over_uniform"
ENTROPY: Final = "adp_samp/entropy"


class NoSamplingError(RallypointError):
    """The run has no motion sampler."""


@dataclass
class Sampling:
    """What is drawn."""

    library: MotionLibrary
    over_frames: NDArray[np.float64]
    """By bin: probability over that of drawing by frames alone."""
    failure_rate: NDArray[np.float64]
    """By bin: failures per pass through it, with the prior."""
    env_steps: list[int] = field(default_factory=list)
    greatest: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)


def read_sampling(rundir: RunDir) -> Sampling:
    """Of a run's directory. Raises `NoSamplingError` when its task follows no motions."""
    sampling = _of_checkpoint(load_checkpoint(str(rundir.path)))
    with rundir.journal.open(encoding="utf-8") as lines:
        iterations, _ = committed(lines)
    for line in iterations.values():
        sampling.env_steps.append(line["env_steps_total"])
        sampling.greatest.append(line["metrics"][GREATEST])
        sampling.entropy.append(line["metrics"][ENTROPY])
    return sampling


def draw(sampling: Sampling, path: Path) -> None:
    """Write the picture as PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    panels = (
        ("drawn, over drawn by frames", sampling.over_frames),
        ("failures per pass", sampling.failure_rate),
    )
    for column, (title, values) in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        image = axes.imshow(_by_clip(sampling.library, values), aspect="auto", cmap="viridis")
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("bin (1 s)")
        names = sampling.library.clips if column == 0 else ()
        axes.set_yticks(range(len(names)), names, fontsize=8)
    curves = ((GREATEST, sampling.greatest), (ENTROPY, sampling.entropy))
    for column, (name, curve) in enumerate(curves):
        axes = figure.add_subplot(grid[1, column])
        axes.plot(sampling.env_steps, curve)
        axes.set_xlabel("env steps")
        axes.set_ylabel(name, fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _of_checkpoint(loaded: LoadedCheckpoint) -> Sampling:
    config = configuration(loaded)
    env = make_env(config, dtype=torch.float32)
    try:
        library, sampler = env.spec.library, restore_learner(loaded, config, env.spec).sampler
    finally:
        env.close()
    if library is None or sampler is None:
        raise NoSamplingError(f"env.task = {config.env.task!r} follows no motions: nothing to draw")
    lengths = np.array(library.lengths, dtype=np.float64)
    return Sampling(
        library,
        sampler.probabilities().numpy() / (lengths / lengths.sum()),
        sampler.failure_rates().numpy(),
    )


def _by_clip(library: MotionLibrary, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """One row per clip, NaN beyond its end."""
    counts = [len(frames) for frames in library.bin_frames]
    table = np.full((len(counts), max(counts)), np.nan)
    for row, part in zip(table, np.split(values, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; prints the path of the picture. Exit code 1 when there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="rallypoint.ops.sampling")
    parser.add_argument("dir", type=Path, metavar="DIR")
    rundir = RunDir(parser.parse_args(arguments).dir)
    path = rundir.path / "sampling.png"
    try:
        draw(read_sampling(rundir), path)
    except (OSError, RallypointError) as error:
        print(f"no picture: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
