"""``rallypoint reproduce JOURNAL``: one process trains again what a job trained, whatever happened to it.

The journal says which env blocks entered each iteration, and which of them began new episodes for it;
everything else follows from the configuration and the keyed random numbers. So the loss of workers,
rollouts that were left out, moves between workers and restores are all in it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from rallypoint.checkpointing import credentials
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer import warmstart
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.envrows import env_ids, register_curriculum
from rallypoint.trainer.elastic.registry import StateRegistry, hash_text
from rallypoint.trainer.elastic.state import CommitRecord, TrainingState
from rallypoint.trainer.envs.base import AdaptiveEnv, VecEnv
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.errors import CheckpointMismatch, TrainerError
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.ppo import DTYPES


class JournalError(TrainerError):
    """The journal does not say what is needed; the message says what is missing."""


class Share(msgspec.Struct, frozen=True):
    """What one rank put into an iteration."""

    blocks: tuple[int, ...]
    cut: tuple[int, ...] = ()


class _GenerationLine(msgspec.Struct, frozen=True, tag="generation", tag_field="event"):
    generation: int
    restore: bool
    iteration: int
    config: dict[str, Any] | None = None
    warm_start: str | None = None


class IterationLine(msgspec.Struct, frozen=True, tag="iteration", tag_field="event"):
    """A committed iteration, as far as it decides what is trained."""

    generation: int
    iteration: int
    world_size: int
    ranks: tuple[Share, ...]
    state_hash: str
    env_steps_total: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Env blocks whose rollouts entered it."""
        return tuple(sorted(b for rank in self.ranks for b in rank.blocks))

    @property
    def cut(self) -> tuple[int, ...]:
        """Those whose envs began new episodes for it."""
        return tuple(sorted(b for rank in self.ranks for b in rank.cut))


class _OtherLine(msgspec.Struct, frozen=True, tag="recovery", tag_field="event"):
    pass


_decoder: Final = msgspec.json.Decoder(_GenerationLine | IterationLine | _OtherLine)


@dataclass(frozen=True)
class Lineage:
    """What the newest state of a job was trained from."""

    config: Config
    iterations: tuple[IterationLine, ...]
    """From 1 on; without those that a restore has wound back."""
    warm_start: str | None = None
    """Checkpoint that gave the first parameters."""


def read_lineage(lines: Iterable[bytes]) -> Lineage:
    """Raises `JournalError` when an iteration or the configuration is missing."""
    config: dict[str, Any] | None = None
    warm_start: str | None = None
    kept: dict[int, IterationLine] = {}
    for raw in lines:
        try:
            line = _decoder.decode(raw)
        except msgspec.MsgspecError:
            continue  # a supervisor was killed while it wrote this one
        if isinstance(line, _GenerationLine) and line.restore:
            kept = {k: x for k, x in kept.items() if k <= line.iteration}
            config = line.config or config
            warm_start = line.warm_start
        elif isinstance(line, IterationLine):
            kept[line.iteration] = line
    if config is None:
        raise JournalError(
            "no line of the journal has the configuration of the job; give the journal.jsonl of a run "
            "that has formed, or its directory"
        )
    missing = sorted(set(range(1, max(kept, default=0) + 1)) - set(kept))
    if missing:
        raise JournalError(
            f"the journal lacks iterations {missing[:5]}: only a run that has its whole journal can be "
            "reproduced"
        )
    trained = msgspec.convert(config, Config)
    _require_one_process(trained)
    return Lineage(trained, tuple(kept[k] for k in sorted(kept)), warm_start)


def _require_one_process(config: Config) -> None:
    """Raises `JournalError` for options whose outcome is not that of one process on all envs."""
    by_rank = [
        text
        for text, depends in (
            ('ppo.advantage_scope = "rank"', config.ppo.advantage_scope != "global"),
            ('ppo.permutation_scope = "rank"', config.ppo.permutation_scope != "block"),
            ("sampler.sonic_mean_every", config.sampler.sonic_mean_every is not None),
        )
        if depends
    ]
    if by_rank:
        raise JournalError(
            f"one process cannot reproduce a run with {', '.join(by_rank)}: it depends on the ranks"
        )


class Reproduction:
    """Trains the iterations of a journal, one after the other."""

    def __init__(self, config: Config, warm_start: str | None = None) -> None:
        """``warm_start`` is the checkpoint that the job began with. Raises as `warmstart.load`."""
        if config.ppo.reduction == "ordered":
            torch.set_num_threads(1)
        self._config = config
        self._env: VecEnv = make_env(config, dtype=DTYPES[config.ppo.dtype])
        self._learner = learner_type(config)(config, self._env.spec, torch.device("cpu"))
        registry = StateRegistry()
        self._learner.register(registry)
        register_curriculum(registry, self._env)
        if warm_start is not None:
            warmstart.load(warm_start, config, registry.shared(), lambda text: None)
        self.state = TrainingState(registry)

    def step(self, line: IterationLine) -> str:
        """Train one iteration; the hash of the state after it. Raises `JournalError` when envs should
        go on that were not in the iteration before."""
        self._assign(line)
        rollout = self._learner.collect(self._env, line.iteration, on_step=lambda _: None)
        single = SingleProcess()
        self._learner.update(rollout, single, self._learner.module, line.iteration, lambda: None)
        figures = self._learner.merge(single.all_gather("last", self._learner.pack(rollout)))
        if isinstance(self._env, AdaptiveEnv):
            self._env.advance(figures)
        record = CommitRecord(
            generation=line.generation,
            iteration=line.iteration,
            env_steps_total=int(self.state.env_steps) + rollout.env_steps,
            ranks=(),
            metrics={},
            stop=False,
            newest_plan=line.generation,
        )
        self.state.prepare(record)
        self.state.commit()
        return hash_text(self.state.snapshot.hash())

    def close(self) -> None:
        """Release the env."""
        self._env.close()

    def _assign(self, line: IterationLine) -> None:
        size = self._config.env.block
        go_on = tuple(b for b in line.blocks if b not in line.cut)
        absent = [b for b in go_on if b * size not in self._env.env_ids]
        if absent:
            raise JournalError(
                f"iteration {line.iteration}: env blocks {absent} go on with episodes that the iteration "
                "before did not have: the journal is not complete"
            )
        self._learner.set_up(self._env)
        for blocks in (go_on, line.blocks):  # what goes on, then what begins anew
            ids = env_ids(blocks, size)
            self._env.assign(ids, iteration=line.iteration)
            self._learner.on_assign(ids)


@dataclass(frozen=True)
class Report:
    """How a reproduction compares to the job."""

    iterations: int
    env_steps: int
    equal_hashes: int
    """Iterations after which every bit of the state is the same."""
    first_difference: int | None
    """First iteration after which it is not."""
    checkpoint: str | None
    """What was compared in numbers; None: there is none."""
    checkpoint_iteration: int | None
    difference: float | None
    """As `largest_difference` says, of the state there."""


def reproduce(
    lineage: Lineage,
    checkpoint: tuple[int, Mapping[str, Tensor], str] | None,
    on_iteration: Callable[[int], None] = lambda _: None,
) -> Report:
    """Train it all again. ``checkpoint`` is (iteration, tensors, path) to compare with. Raises
    `CheckpointMismatch` when it is of other networks, before anything is trained."""
    reproduction = Reproduction(lineage.config, lineage.warm_start)
    equal, first, difference = 0, None, None
    try:
        if checkpoint is not None:
            _require_same_tensors(
                reproduction.state.registry.shared(), checkpoint[1], checkpoint[2]
            )
        for line in lineage.iterations:
            if reproduction.step(line) == line.state_hash:
                equal += 1
            elif first is None:
                first = line.iteration
            if checkpoint is not None and line.iteration == checkpoint[0]:
                difference = largest_difference(
                    reproduction.state.snapshot.tensors(), checkpoint[1]
                )
            on_iteration(line.iteration)
    finally:
        reproduction.close()
    compared = None if checkpoint is None or difference is None else checkpoint
    return Report(
        iterations=len(lineage.iterations),
        env_steps=int(reproduction.state.env_steps),
        equal_hashes=equal,
        first_difference=first,
        checkpoint=None if compared is None else compared[2],
        checkpoint_iteration=None if compared is None else compared[0],
        difference=difference,
    )


def _require_same_tensors(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], path: str
) -> None:
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != tensor.shape:
            held = "nothing" if other is None else list(other.shape)
            raise CheckpointMismatch(
                f"{path} is not of the job of this journal: it holds {name!r} as {held}, the journal's "
                f"configuration makes it {list(tensor.shape)}; give another --checkpoint"
            )


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Over all numbers of the shared state: absolute up to 1, relative above. Sums over samples grow
    with the run, and the rounding of their last bit with them."""
    return max(
        ((ours[name].double() - expected).abs() / expected.abs().clamp(min=1.0)).max().item()
        for name, expected in ((name, theirs[name].double()) for name in ours)
        if expected.numel()
    )


@dataclass(frozen=True)
class ReproduceCommand:
    """Train a journal again; no supervisor is needed."""

    help: str = "train again, in one process, what a journal says, and compare"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "journal", metavar="JOURNAL", type=Path, help="journal.jsonl, or the run's directory"
        )
        parser.add_argument(
            "--checkpoint",
            metavar="CHECKPOINT",
            help="what to compare with in numbers (default: the newest one beside the journal)",
        )
        credentials.add_option(parser)
        text = "exit with 1 if a number differs by more than this from the checkpoint's"
        parser.add_argument("--tolerance", type=float, metavar="X", help=text)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Reproduce and print; 0, or 1 when the difference is over the tolerance or unknown."""
        path = args.journal / "journal.jsonl" if args.journal.is_dir() else args.journal
        try:
            lineage = read_lineage(path.read_bytes().splitlines())
        except OSError as error:
            raise JournalError(
                f"{path}: cannot be read: {error.strerror}; give a run's directory or its journal.jsonl"
            ) from error
        except JournalError as error:
            raise JournalError(f"{path}: {error}") from error
        where = args.checkpoint or str(path.parent / "checkpoints")
        checkpoint = _checkpoint(where, args.credentials_file, lineage)
        total = len(lineage.iterations)

        def tell(iteration: int) -> None:
            print(f"\riteration {iteration} of {total}", end="", file=sys.stderr, flush=True)

        report = reproduce(lineage, checkpoint, tell if sys.stderr.isatty() else lambda _: None)
        print(msgspec.json.encode(report).decode() if args.json else _text(report))
        if args.tolerance is None:
            return 0
        return int(report.difference is None or not report.difference <= args.tolerance)


def _checkpoint(
    where: str, credentials_file: str | None, lineage: Lineage
) -> tuple[int, Mapping[str, Tensor], str] | None:
    """The newest one there, if its iteration is in the lineage."""
    try:
        loaded = load_checkpoint(where, credentials_file)
    except CheckpointError as error:
        print(f"nothing to compare with in numbers: {error}", file=sys.stderr)
        return None
    if not 1 <= loaded.info.iteration <= len(lineage.iterations):
        print(
            f"{loaded.info.path} is of iteration {loaded.info.iteration}, the journal ends at "
            f"{len(lineage.iterations)}: nothing to compare with in numbers",
            file=sys.stderr,
        )
        return None
    return loaded.info.iteration, loaded.tensors, loaded.info.path


def _text(report: Report) -> str:
    lines = [
        f"{report.iterations} iterations, {report.env_steps} env steps, in one process",
        f"same state, bit for bit, after {report.equal_hashes} of them",
    ]
    if report.first_difference is not None:
        lines.append(f"first difference after iteration {report.first_difference}")
    if report.difference is not None:
        lines.append(
            f"largest difference to {report.checkpoint} (iteration {report.checkpoint_iteration}): "
            f"{report.difference:.3g}"
        )
    return "\n".join(lines)


COMMAND: Command = ReproduceCommand()
