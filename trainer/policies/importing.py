"""``rallypoint import FILE.pt``: a policy of RSL-RL or SONIC becomes a checkpoint.

The file is loaded without running anything that it holds (``weights_only``): what is not tensors, numbers
and text is refused.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rallypoint import __version__
from rallypoint.checkpointing.manifest import CheckpointMeta
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import Given
from rallypoint.trainer.elastic.registry import StateRegistry
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.networks import critic_group
from rallypoint.trainer.policies import layouts
from rallypoint.trainer.policies.layouts import Mapped
from rallypoint.trainer.ppo import DTYPES, PpoLearner


class ImportRefused(TrainerError):
    """The file holds no policy that can be taken; nothing was written."""


@dataclass(frozen=True)
class Imported:
    """The result, with the field names of ``--json``."""

    path: str
    """The checkpoint's directory."""
    layout: str
    iteration: int
    task: str
    settings: dict[str, str]
    """Keys that the file decided, as ``--set`` takes them; a job that starts with it needs the same."""
    mapped: dict[str, str]
    """Name in the file of everything that was taken, by its name here."""
    fresh: tuple[str, ...]
    """Parameters that the file does not have: drawn, as in a new job."""
    left: tuple[str, ...]
    """What the file holds beside that."""


def _why(error: Exception) -> str:
    """What torch found, without its advice to load the file all the same."""
    found = re.search(r"[Uu]nsupported (operand|global:|GLOBAL)( GLOBAL)? \S+", str(error))
    said = found[0] if found else "".join(str(error).strip().splitlines()[:1]).partition(". ")[0]
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def load(path: Path) -> tuple[Mapped, int]:
    """What a file holds, and its iteration (0 where it has none). Raises `ImportRefused`."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ImportRefused(
            f"{path}: cannot be read: {error.strerror or error}; give the .pt file of a policy"
        ) from error
    # Whatever a damaged or hostile file makes of it: unpickling has no error of its own.
    except Exception as error:
        raise ImportRefused(
            f"{path}: not a file of tensors, numbers and text alone, and nothing else is loaded "
            f"({_why(error)}). A file that also holds objects, as SONIC's do, must be reduced by its owner "
            "to its state dictionaries"
        ) from error
    if not isinstance(content, Mapping):
        raise ImportRefused(f"{path}: holds a {type(content).__name__}, not a dictionary")
    mapped = layouts.read(content)
    if mapped is None:
        known = sorted({key for layout in layouts.LAYOUTS.values() for key in layout})
        raise ImportRefused(
            f"{path}: no policy of {', '.join(layouts.LAYOUTS)} was found. It holds "
            f"{', '.join(map(str, content)) or 'nothing'}; looked for {', '.join(known)}"
        )
    iteration = content.get("iter", 0)
    return mapped, iteration if isinstance(iteration, int) and iteration >= 0 else 0


def settings_of(mapped: Mapped) -> dict[str, str]:
    """Keys of the configuration that the file decides."""
    settings = {
        "ppo.hidden": str(_hidden(mapped, "actor")),
        "ppo.noise": "log_std" if "log_std" in mapped.tensors else "std",
        "ppo.normalise_actor": str("actor/mean" in mapped.tensors).lower(),
        "ppo.normalise_critic": str("critic/mean" in mapped.tensors).lower(),
    }
    if any(name.startswith("critic.") for name in mapped.tensors):
        settings["ppo.critic_hidden"] = str(_hidden(mapped, "critic"))
    return settings


def _hidden(mapped: Mapped, network: str) -> list[int]:
    """Widths of the hidden layers."""
    weights = {
        int(name.split(".")[1]): tensor
        for name, tensor in mapped.tensors.items()
        if name.startswith(f"{network}.") and name.endswith(".weight")
    }
    return [weights[index].shape[0] for index in sorted(weights)[:-1]]


def convert(mapped: Mapped, config: Config) -> tuple[PpoLearner, dict[str, str], tuple[str, ...]]:
    """A learner with what the file holds; the name in the file of everything that was taken, by its name
    here; and the parameters that it does not have.

    Raises `ImportRefused`, with every difference, when shapes do not fit the task and the networks."""
    env = make_env(config, dtype=DTYPES[config.ppo.dtype])
    try:
        spec = env.spec
        learner = PpoLearner(config, spec, torch.device("cpu"))
    finally:
        env.close()
    groups = {"actor": "actor", "critic": critic_group(spec.obs_dims)}
    found, names = _ours(mapped, groups)
    live = {n: t for n, t in learner.frozen_tensors().items() if not n.endswith("/count")}
    wrong = [
        f"{names[name]}: {list(found[name].shape)} in the file, {_shape(live.get(name))} here"
        for name in sorted(found)
        if name not in live or found[name].shape != live[name].shape
    ]
    missing = [n for n in live if n.startswith("model/actor.") and n not in found]
    wrong += [f"{name}: nothing in the file, {_shape(live[name])} here" for name in missing]
    if wrong:
        raise ImportRefused(
            f"the file does not fit the task {config.env.task!r}: {'; '.join(wrong)}. Give the task it "
            "was trained on (--task), or one with the same observations and actions"
        )
    with torch.no_grad():
        for name, tensor in found.items():
            live[name].copy_(tensor)
        for network, group in groups.items():
            count = mapped.tensors.get(f"{network}/count")
            if f"normaliser/{group}/mean" in found and count is not None:
                learner.frozen_tensors()[f"normaliser/{group}/count"].fill_(int(count))
    return learner, names, tuple(sorted(live.keys() - found.keys()))


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))


def _ours(mapped: Mapped, groups: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by their names in the state, and where each was. Statistics become count, mean, m2 of the
    group that a network sees. Raises `ImportRefused` for two that contradict each other."""
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for target, tensor in mapped.tensors.items():
        network, _, part = target.partition("/")
        if not part:
            found[f"model/{target}"], names[f"model/{target}"] = tensor, mapped.names[target]
            continue
        if part == "count":
            continue
        value = tensor.double().reshape(-1)
        if part == "var":
            value = value * float(mapped.tensors.get(f"{network}/count", torch.tensor(2)))
        name = f"normaliser/{groups[network]}/{'m2' if part == 'var' else part}"
        if name in found and not torch.allclose(found[name], value, rtol=1e-5, atol=1e-8):
            raise ImportRefused(
                f"{names[name]} and {mapped.names[target]} differ, but actor and critic of this task see "
                "the same observations, which have one statistic here"
            )
        if name not in found:
            found[name], names[name] = value, mapped.names[target]
    return found, names


def write(learner: PpoLearner, config: Config, iteration: int, source: str, output: Path) -> str:
    """Commit a checkpoint of a job that has just begun with this policy; its directory."""
    registry = StateRegistry()
    learner.register(registry)
    TrainingState(registry).iteration.fill_(iteration)
    tensors = {name: tensor.detach() for name, tensor in registry.shared().items()}
    sections: dict[str, Any] = msgspec.to_builtins(config)
    meta = CheckpointMeta(
        job=config.job.name,
        job_uid="",
        iteration=iteration,
        generation=0,
        env_steps=0,
        world_size=1,
        budget=config.env.budget,
        config_hash=configload.config_hash(config),
        config={name: sections[name] for name in configload.RECORDED},
        versions={"rallypoint": __version__, "torch": str(torch.__version__)},
        warm_start=source,
    )
    scopes = {name: registry.scope_of(name).value for name in tensors}
    store = CheckpointStore(str(output))
    return store.save(tensors, scopes, meta, may_commit=lambda: CommitVerdict(True)).path


@dataclass(frozen=True)
class ImportCommand:
    """Take in a policy of another trainer; no supervisor is needed."""

    help: str = "make a checkpoint of a .pt file of RSL-RL or SONIC"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("file", type=Path, metavar="FILE.pt")
        parser.add_argument("--task", metavar="T", help="short for --set env.task=T")
        parser.add_argument("--profile", metavar="P", default="rsl_rl", help="default: rsl_rl")
        text = "directory of checkpoints to put it into (default: FILE without .pt, in the working directory)"
        parser.add_argument("--output", type=Path, metavar="DIR", help=text)
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="assignments",
            help="what the file cannot say, such as ppo.activation; may be repeated",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Import and print; 0."""
        mapped, iteration = load(args.file)
        settings = settings_of(mapped)
        given = [
            Given("job.name", "imported", "import"),
            Given("job.profile", args.profile, "--profile"),
        ]
        given += [configload.from_text(k, v, str(args.file)) for k, v in settings.items()]
        if args.task is not None:
            given.append(Given("env.task", args.task, "--task"))
        given += [configload.parse_assignment(text) for text in args.assignments]
        config = configload.load(command_line=given).config
        learner, names, fresh = convert(mapped, config)
        output = args.output or Path(args.file.stem)
        path = write(learner, config, iteration, str(args.file), output)
        done = Imported(
            path, mapped.layout, iteration, config.env.task, settings, names, fresh, mapped.left
        )
        if args.json:
            print(msgspec.json.encode(done).decode())
        else:
            _tell(done)
        return 0


def _tell(done: Imported) -> None:
    print(f"{done.path}: {done.layout}, iteration {done.iteration}, task {done.task}")
    for name, source in sorted(done.mapped.items()):
        print(f"  {source:<48} -> {name}")
    for name in done.fresh:
        print(f"  not in the file: {name} (fresh)", file=sys.stderr)
    for name in done.left:
        print(f"  not taken: {name}", file=sys.stderr)
    print("a job that begins with it needs: ", end="")
    print(" ".join(f"--set '{key}={value}'" for key, value in done.settings.items()))


COMMAND: Command = ImportCommand()
