"""``rallypoint play CHECKPOINT --video F|--png F``: what a policy does, to look at. No display is needed."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.checkpointing.restore import LoadedCheckpoint
from rallypoint.daemon.shared.command import Command
from rallypoint.trainer.envs.base import DrawnEnv, MotionEnv, Scene, VecEnv
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.evaluate import (
    FIRST_ENV_ID,
    ITERATION,
    add_checkpoint,
    configuration,
    load_told,
    restore_learner,
    resume_env,
)
from rallypoint.trainer.policies.files import put_in_place
from rallypoint.trainer.policies.render import DRAWING, MOTION, NO_RENDERER, Drawing
from rallypoint.trainer.ppo import DTYPES, PpoLearner

RENDERERS: Final = ("egl", "osmesa")
"""What ``MUJOCO_GL`` may name without a display, in the order in which they are tried."""
_TIMEOUT_S: Final = 3600.0


class PlayError(TrainerError):
    """Nothing could be drawn; the message says what was tried."""


@dataclass(frozen=True)
class Played:
    """The result, with the field names of ``--json``."""

    path: str
    task: str
    iteration: int
    episodes: int
    frames: int
    seconds: float
    """Of simulated time in what was drawn."""
    fell: int
    """Episodes that the task terminated."""
    renderer: str
    """As ``MUJOCO_GL`` names it."""


@dataclass(frozen=True)
class Recorded:
    """The motion of some episodes, one after the other."""

    positions: NDArray[np.float64]
    """``[F, nq]``."""
    fell: int


@torch.no_grad()
def record(
    learner: PpoLearner, env: DrawnEnv, episodes: int, steps: int, *, iteration: int = ITERATION
) -> Recorded:
    """Run the mean policy in ``episodes`` envs that training never uses, each for ``steps`` steps or until
    the task terminates it; a time limit inside of that begins another episode. Clips of a task that
    follows motions are taken in turn, from their first frames. ``iteration`` is as `resume_env` says."""
    ids = np.arange(FIRST_ENV_ID, FIRST_ENV_ID + episodes)
    env.assign(ids, iteration=iteration)
    obs = env.begin_rollout(iteration)
    if isinstance(env, MotionEnv) and env.spec.library is not None:
        obs = env.start_clips(np.arange(episodes) % len(env.spec.library.clips))
    track = [env.positions()]
    lengths = np.full(episodes, steps + 1)
    for step in range(1, steps + 1):
        result = env.step(learner.mean_action(obs))
        obs = result.obs
        track.append(env.positions())
        ended = result.terminated.numpy() & (lengths > step)
        lengths[ended] = step  # what follows is the next episode
        if (lengths <= step).all():
            break
    rows = np.stack(track)
    parts = [rows[:length, episode] for episode, length in enumerate(lengths)]
    return Recorded(np.concatenate(parts), int((lengths <= steps).sum()))


def play(
    loaded: LoadedCheckpoint, output: Path, episodes: int, seconds: float, size: tuple[int, int]
) -> Played:
    """Draw the policy of a checkpoint into ``output``: a ``.png`` has the last moment, an ``.mp4`` all.

    Raises `PlayError` when no renderer works, `TrainerError` for a task that cannot be drawn."""
    config = configuration(loaded)
    env: VecEnv = make_env(config, dtype=DTYPES[config.ppo.dtype])
    try:
        if not isinstance(env, DrawnEnv):
            raise PlayError(f"the task {env.spec.task!r} cannot be drawn")
        spec, scene = env.spec, env.scene
        learner = restore_learner(loaded, config, spec)
        steps = max(1, round(seconds / spec.step_dt_s))
        recorded = record(learner, env, episodes, steps, iteration=resume_env(loaded, env))
    finally:
        env.close()
    fps = 1.0 / spec.step_dt_s
    renderer = draw(scene, recorded.positions, output, fps, size)
    still = output.suffix == ".png"
    return Played(
        path=str(output),
        task=spec.task,
        iteration=loaded.info.iteration,
        episodes=episodes,
        frames=1 if still else len(recorded.positions),
        seconds=0.0 if still else len(recorded.positions) / fps,
        fell=recorded.fell,
        renderer=renderer,
    )


def draw(
    scene: Scene,
    positions: NDArray[np.float64],
    output: Path,
    fps: float,
    size: tuple[int, int],
) -> str:
    """Draw generalised positions ``[F, nq]``; the renderer that worked. ``MUJOCO_GL``, where it is set,
    is the only one that is tried. Raises `PlayError`; then nothing is written."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-play-") as name:
        folder = Path(name)
        drawing = Drawing(
            mjcf=scene.mjcf,
            output=f"drawn{output.suffix}",
            fps=fps,
            width=size[0],
            height=size[1],
            distance_m=scene.distance_m,
            follows=scene.follows,
        )
        np.savez(folder / MOTION, qpos=positions)
        (folder / DRAWING).write_bytes(msgspec.json.encode(drawing))
        renderer = _render(folder)
        put_in_place((folder / drawing.output).read_bytes(), output)
    return renderer


def _render(folder: Path) -> str:
    asked = os.environ.get("MUJOCO_GL")
    tried = []
    for renderer in (asked,) if asked else RENDERERS:
        command = [sys.executable, "-m", "rallypoint.trainer.policies.render", str(folder)]
        done = subprocess.run(
            command,
            env={**os.environ, "MUJOCO_GL": renderer, "PYOPENGL_PLATFORM": renderer},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            return renderer
        said = done.stderr.strip().splitlines()[-1:]
        tried.append(f"{renderer}: {''.join(said) or f'exit code {done.returncode}'}")
        if done.returncode not in (NO_RENDERER, 1):
            continue  # a driver that crashes is one that does not work
        if done.returncode == 1:
            raise PlayError("".join(said))
    raise PlayError(
        f"no renderer works here ({'; '.join(tried)}); install one that needs no display, on Debian "
        "libegl1 and libgl1-mesa-dri, or libosmesa6"
    )


@dataclass(frozen=True)
class PlayCommand:
    """Look at a checkpoint; no supervisor and no display are needed."""

    help: str = "draw what the policy of a checkpoint does, as a video or a picture"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_checkpoint(parser)
        kind = parser.add_mutually_exclusive_group()
        kind.add_argument("--video", type=Path, metavar="F.mp4", help="default: TASK-ITERATION.mp4")
        kind.add_argument("--png", type=Path, metavar="F.png", help="the last moment alone")
        parser.add_argument("--episodes", type=_at_least_one, default=1, metavar="N")
        parser.add_argument(
            "--seconds", type=_positive, default=10.0, metavar="S", help="of each (default: 10)"
        )
        parser.add_argument(
            "--size", type=_size, default=(960, 540), metavar="WxH", help="default: 960x540"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Play and print; 0."""
        output: Path | None = args.video or args.png
        wanted = ".png" if args.png else ".mp4"
        if output is not None and output.suffix != wanted:
            raise PlayError(f"{output}: the name of the file must end in {wanted}")
        loaded = load_told(args)
        if output is None:
            task = configuration(loaded).env.task
            output = Path(f"{task}-{loaded.info.iteration:010d}.mp4")
        done = play(loaded, output, args.episodes, args.seconds, args.size)
        print(msgspec.json.encode(done).decode() if args.json else _text(done))
        return 0


def _text(done: Played) -> str:
    return (
        f"{done.path}: {done.task}, iteration {done.iteration}, {done.episodes} episodes "
        f"({done.fell} fell), {done.frames} frames, {done.seconds:.1f} s, drawn by {done.renderer}"
    )


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and below an hour")
    return value


def _size(text: str) -> tuple[int, int]:
    sides: Sequence[str] = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} must be WIDTHxHEIGHT, such as 960x540")
    width, height = int(sides[0]), int(sides[1])
    if not (16 <= width <= 3840 and 16 <= height <= 2160) or width % 2 or height % 2:
        raise argparse.ArgumentTypeError(f"{text!r}: even numbers from 16x16 to 3840x2160")
    return width, height


COMMAND: Command = PlayCommand()
