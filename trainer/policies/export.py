"""``rallypoint export CHECKPOINT --format onnx|torchscript``: the policy in one file, for a robot."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from rallypoint import __version__
from rallypoint.checkpointing.restore import LoadedCheckpoint
from rallypoint.daemon.shared.command import Command
from rallypoint.trainer.envs.base import EnvSpec
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.evaluate import add_checkpoint, configuration, load_told, restore_learner
from rallypoint.trainer.policies import onnxfile, torchscriptfile
from rallypoint.trainer.policies.errors import ExportError
from rallypoint.trainer.policies.files import put_in_place
from rallypoint.trainer.policies.policy import DeployedPolicy
from rallypoint.trainer.ppo import DTYPES, PpoLearner

FORMATS: Final = {"onnx": onnxfile, "torchscript": torchscriptfile}
SUFFIXES: Final[Mapping[str, str]] = {"onnx": ".onnx", "torchscript": ".pt"}
OBSERVATIONS: Final = 4096
"""Random ones that a file is held against the policy with."""
TOLERANCE: Final = 1e-4
"""Greatest difference of an action, in units of the action or of the bound where that is more."""


@dataclass(frozen=True)
class Exported:
    """The result, with the field names of ``--json``."""

    path: str
    format: str
    largest_difference: float
    """Between an action of the file and one of the policy, over `OBSERVATIONS` random observations."""
    observations: int
    metadata: dict[str, str]
    """As the file holds it."""


def export(loaded: LoadedCheckpoint, kind: str, output: Path | None) -> Exported:
    """Write the policy of a checkpoint, and run what was written. ``output`` is a path; None makes one
    of task and iteration, in the working directory.

    Raises `ExportError` when the file does not compute what the policy does, `MissingExtra` when a
    package is not installed, `OutputError` for a place that cannot be written; then nothing is left behind."""
    config = configuration(loaded)
    exact = replace(config, ppo=replace(config.ppo, autocast=None))  # the parameters as they are
    env = make_env(exact, dtype=DTYPES[exact.ppo.dtype])
    try:
        spec = env.spec
        learner = restore_learner(loaded, exact, spec)
    finally:
        env.close()
    policy = learner.deployed()
    data = FORMATS[kind].encode(policy, metadata(loaded, spec, policy))
    difference, said = compare(data, kind, learner, policy, seed=loaded.info.iteration)
    if not difference <= TOLERANCE * max(1.0, policy.action_bound or 1.0):
        raise ExportError(
            f"the {kind} file differs from the policy by {difference:.3g} in an action: not written"
        )
    path = output or Path(f"{spec.task}-{loaded.info.iteration:010d}{SUFFIXES[kind]}")
    put_in_place(data, path)
    return Exported(str(path), kind, difference, OBSERVATIONS, said)


def metadata(loaded: LoadedCheckpoint, spec: EnvSpec, policy: DeployedPolicy) -> dict[str, str]:
    """What whoever runs the file must know; all values are text (numbers and lists as JSON)."""
    manifest = loaded.manifest
    values = {
        "task": spec.task,
        "job": manifest.job,
        "iteration": manifest.iteration,
        "generation": manifest.generation,
        "env_steps": manifest.env_steps,
        "config_hash": manifest.config_hash,
        "checkpoint": loaded.info.directory,
        "rallypoint_version": __version__,
        "input": onnxfile.INPUT,
        "input_group": "actor",
        "input_size": policy.inputs,
        "output": onnxfile.OUTPUT,
        "output_size": policy.outputs,
        "action_names": spec.action_names,
        "action_bound": policy.action_bound,
        "step_dt_s": spec.step_dt_s,
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


@torch.no_grad()
def compare(
    data: bytes, kind: str, learner: PpoLearner, policy: DeployedPolicy, *, seed: int
) -> tuple[float, dict[str, str]]:
    """Largest difference of an action between the file and the policy as training runs it, and the
    file's metadata. Observations spread three times as far as those of training, so that bounds of
    observations and of actions are met as well."""
    run, said = FORMATS[kind].runner(data)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(OBSERVATIONS, policy.inputs, generator=generator)
    obs = policy.mean + 3.0 * draws / policy.inverse_scale
    expected = learner.mean_action({"actor": obs}).cpu().double()
    if policy.action_bound is not None:
        expected = expected.clamp(-policy.action_bound, policy.action_bound)
    found = torch.as_tensor(run(obs)).double()
    difference: Tensor = (found - expected).abs().max()
    return difference.item(), said


@dataclass(frozen=True)
class ExportCommand:
    """Export a checkpoint; no supervisor is needed."""

    help: str = "write the policy of a checkpoint as ONNX or TorchScript, and verify the file"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_checkpoint(parser)
        parser.add_argument("--format", choices=tuple(FORMATS), default="onnx")
        parser.add_argument(
            "--output",
            type=Path,
            metavar="F",
            help="the file (default: TASK-ITERATION.onnx or .pt in the working directory)",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Export and print; 0."""
        loaded = load_told(args)
        done = export(loaded, args.format, args.output)
        if args.json:
            print(msgspec.json.encode(done).decode())
            return 0
        said = done.metadata
        print(f"{done.path}: {said['task']}, iteration {said['iteration']} of job {said['job']}")
        print(f"{said['input']} [batch, {said['input_size']}] -> ", end="")
        print(f"{said['output']} [batch, {said['output_size']}], float32")
        print(
            f"largest difference to the policy over {done.observations} random observations: "
            f"{done.largest_difference:.3g}"
        )
        return 0


COMMAND: Command = ExportCommand()
