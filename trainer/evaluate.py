"""``rallypoint eval CHECKPOINT --episodes N [--json]``: the mean policy on envs it never trained on."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import torch

from rallypoint.checkpointing import credentials
from rallypoint.checkpointing.restore import LoadedCheckpoint, load_checkpoint
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.elastic.envrows import register_curriculum
from rallypoint.trainer.elastic.registry import PackedState, StateRegistry
from rallypoint.trainer.envs.base import AdaptiveEnv, EnvSpec, MotionEnv, VecEnv
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.evaluate_motions import ClipEvaluation, evaluate_clips
from rallypoint.trainer.ppo import DTYPES, PpoLearner

CPU: Final = torch.device("cpu")
FIRST_ENV_ID: Final = 2**31
"""Training uses smaller ids: these envs are unseen."""
ITERATION: Final = 0
"""Key of the random draws; training counts from 1."""
STEPS: Final = 1000
"""Env steps of every env."""
SETTLE_STEPS: Final = 100
"""Steps before the velocity error counts: time to get going from rest."""
_VELOCITY_ERROR: Final = "velocity_error_m_s"


@dataclass(frozen=True)
class Evaluation:
    """The result, with the field names of ``--json``."""

    task: str
    episodes: int
    """Envs, one episode each: it ends when the task terminates it, or after `STEPS` steps. A time
    limit inside of that resets the env, but does not end the episode."""
    steps: int
    """Env steps of all episodes."""
    return_mean: float
    """Mean over episodes of the sum of rewards."""
    length_mean: float
    """Mean length in steps."""
    velocity_error_m_s: float | None
    """Mean over env steps of live episodes from step `SETTLE_STEPS` on. None: the task has no such
    figure, or no episode lived that long."""
    never_fell: float
    """Fraction of episodes that were not terminated."""


@torch.no_grad()
def evaluate(
    learner: PpoLearner,
    env: VecEnv,
    episodes: int,
    *,
    steps: int = STEPS,
    iteration: int = ITERATION,
) -> Evaluation:
    """Run the mean policy in ``episodes`` envs with ids that training never uses; ``iteration`` is as
    `resume_env` returns it."""
    env.assign(np.arange(FIRST_ENV_ID, FIRST_ENV_ID + episodes), iteration=iteration)
    live = torch.ones(episodes, dtype=torch.bool)
    returns = torch.zeros(episodes, dtype=torch.float64)
    lengths = torch.zeros(episodes, dtype=torch.int64)
    error_sum, error_count = 0.0, 0
    obs = env.begin_rollout(iteration)
    for t in range(steps):
        result = env.step(learner.mean_action(obs))
        obs = result.obs
        returns[live] += result.reward.to(torch.float64)[live]
        lengths += live
        if t >= SETTLE_STEPS and _VELOCITY_ERROR in result.figures:
            error_sum += result.figures[_VELOCITY_ERROR][live].sum().item()
            error_count += int(live.sum())
        live &= ~result.terminated
        if not live.any():
            break
    return Evaluation(
        task=env.spec.task,
        episodes=episodes,
        steps=int(lengths.sum()),
        return_mean=returns.mean().item(),
        length_mean=lengths.to(torch.float64).mean().item(),
        velocity_error_m_s=error_sum / error_count if error_count else None,
        never_fell=live.to(torch.float64).mean().item(),
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The arguments ``checkpoint`` and ``credentials_file`` of commands that work on one; for `load_told`."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint's directory, a directory of checkpoints, or a run's directory "
        "(the newest that verifies)",
    )
    credentials.add_option(parser)


def load_told(args: argparse.Namespace) -> LoadedCheckpoint:
    """As `load_checkpoint`; newer ones that do not verify are told on standard error."""
    loaded = load_checkpoint(args.checkpoint, args.credentials_file)
    for skipped in loaded.skipped:
        print(f"skipped a newer checkpoint: {skipped}", file=sys.stderr)
    return loaded


def configuration(loaded: LoadedCheckpoint) -> Config:
    """The job's sections that the checkpoint holds, defaults elsewhere. Raises `TrainerError` when
    this version cannot read them."""
    try:
        return msgspec.convert(loaded.manifest.config, Config)
    except msgspec.ValidationError as error:
        raise TrainerError(
            f"{loaded.info.path}: its configuration does not fit this version of rallypoint: {error}"
        ) from error


def restore_learner(
    loaded: LoadedCheckpoint,
    config: Config,
    spec: EnvSpec,
    device: torch.device = CPU,
) -> PpoLearner:
    """A learner with the state of a checkpoint. Raises `StateMismatch` when it does not fit."""
    eager = replace(config, ppo=replace(config.ppo, compile=None))  # no compiler for a few passes
    learner = PpoLearner(eager, spec, device)
    registry = StateRegistry()
    learner.register(registry)
    _load(loaded, registry)
    return learner


def resume_env(loaded: LoadedCheckpoint, env: VecEnv) -> int:
    """Give an env that grows harder the curriculum of a checkpoint, before it begins episodes. Returns the
    iteration to ask it for: the one that would follow, which says how far the job has come; of another
    env `ITERATION`, so that all checkpoints meet the same episodes.

    Raises `StateMismatch` when the curriculum is not in the checkpoint, or another one."""
    if not isinstance(env, AdaptiveEnv):
        return ITERATION
    registry = StateRegistry()
    register_curriculum(registry, env)
    _load(loaded, registry)
    return loaded.info.iteration + 1


def _load(loaded: LoadedCheckpoint, registry: StateRegistry) -> None:
    live = registry.shared()
    packed = PackedState(live)
    packed.fill_from({name: t for name, t in loaded.tensors.items() if name in live})
    packed.load_into(live)


@dataclass(frozen=True)
class EvalCommand:
    """Evaluate a checkpoint; no supervisor is needed."""

    help: str = "run the mean policy of a checkpoint on unseen envs"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_checkpoint(parser)
        parser.add_argument(
            "--episodes", type=_positive, default=256, metavar="N", help="envs (default: 256)"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Evaluate and print; 0."""
        loaded = load_told(args)
        config = configuration(loaded)
        env = make_env(config, dtype=DTYPES[config.ppo.dtype])
        try:
            learner = restore_learner(loaded, config, env.spec)
            result = evaluate(learner, env, args.episodes, iteration=resume_env(loaded, env))
            clips = _clips(learner, env, args.episodes)
        finally:
            env.close()
        if args.json:
            extra = {"clips": msgspec.to_builtins(clips)} if clips else {}
            print(msgspec.json.encode(msgspec.to_builtins(result) | extra).decode())
        else:
            print(_text(loaded, result, clips))
        return 0


def _clips(learner: PpoLearner, env: VecEnv, episodes: int) -> tuple[ClipEvaluation, ...]:
    """The clips of a task that follows motions; for another one, none."""
    if not isinstance(env, MotionEnv):
        return ()
    return evaluate_clips(learner.mean_action, env, episodes, first_env_id=FIRST_ENV_ID)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _text(loaded: LoadedCheckpoint, result: Evaluation, clips: Sequence[ClipEvaluation]) -> str:
    error = result.velocity_error_m_s
    lines = [
        f"{loaded.info.path} (iteration {loaded.info.iteration})",
        f"{result.task}: {result.episodes} episodes, {result.steps} env steps",
        f"return          {result.return_mean:.3f}",
        f"length          {result.length_mean:.1f} steps",
        f"velocity error  {'-' if error is None else f'{error:.3f} m/s'}",
        f"never fell      {100 * result.never_fell:.1f} %",
    ]
    if clips:
        lines += ["", f"{'clip':<20} survival (zero action)  joint error (zero action)"]
    lines += [
        f"{clip.clip:<20} {100 * clip.survival:6.1f} % {100 * clip.zero_survival:9.1f} %"
        f"  {clip.rmse_rad:9.4f} rad {clip.zero_rmse_rad:8.4f} rad"
        for clip in clips
    ]
    return "\n".join(lines)


COMMAND: Command = EvalCommand()
