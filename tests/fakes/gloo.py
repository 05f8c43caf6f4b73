"""Ranks as real processes over gloo, for tests that need torch's own reduction of gradients."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.timeouts import Timeouts, derive
from rallypoint.trainer.elastic.group import ProcessGroup
from tests.fakes.forked import context
from tests.fakes.training import make_worker, poisoned

Use = tuple[str, str, int]
"""Name, number type and bytes of a collective that a rank took part in."""
Shards = Sequence[Sequence[int]]
Poison = tuple[int, str]
"""A rank, and the field of its rollouts that gets a value that is not a number."""
LEARNING_RATES = "learning_rates"
"""Beside the state: the learning rate after each optimiser step, float64 ``[steps]``."""
_JOIN_S = 180.0


class GlooRank:
    """`Collectives` over the process group of this process, which never changes."""

    def __init__(self, group: ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        return self._group.all_gather(name, value)

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        return self._group.all_reduce_sum(name, value)

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        return self._group.begin_sum(name, value)

    def replicated(self, module: nn.Module) -> nn.Module:
        return self._group.wrap(module)

    def wait_for_gradients(self) -> None:
        self._group.wait_for_gradients()

    def hit(self, failpoint: str) -> None:
        return None


class RecordingGroup(ProcessGroup):
    """Also writes down which collectives it ran, gradients included."""

    def __init__(self, timeouts: Timeouts) -> None:
        super().__init__(timeouts, torch.device("cpu"), sys.exit)
        self.log: list[Use] = []

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        self.log.append((name, str(value.dtype), value.nbytes))
        return super().all_gather(name, value)

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        self.log.append((name, str(value.dtype), value.nbytes))
        return super().begin_sum(name, value)


def collectives_over_gloo(directory: Path, world_size: int) -> list[list[Use]]:
    """What `train_over_gloo` ran in all of its trainings, by rank, in order."""
    texts = [(directory / f"collectives-{rank}.json").read_bytes() for rank in range(world_size)]
    return [msgspec.json.decode(text, type=list[Use]) for text in texts]


def train_over_gloo(
    config: Config,
    trainings: Sequence[Shards],
    iterations: int,
    directory: Path,
    *,
    poison: Poison | None = None,
) -> list[list[dict[str, Tensor]]]:
    """Several trainings, one after the other in the same processes: one rank per shard of env blocks.
    The state at the end and `LEARNING_RATES`, by training and rank. Files go into ``directory``."""
    world_size = len(trainings[0])
    processes = [
        context().Process(
            target=_rank, args=(config, trainings, iterations, directory, rank, poison)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_JOIN_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join(_JOIN_S)
    assert codes == [0] * world_size, f"exit codes of the ranks: {codes}"
    return [
        [load_file(directory / f"{number}-{rank}.safetensors") for rank in range(world_size)]
        for number in range(len(trainings))
    ]


def _rank(
    config: Config,
    trainings: Sequence[Shards],
    iterations: int,
    directory: Path,
    rank: int,
    poison: Poison | None,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world_size = len(trainings[0])
    group = RecordingGroup(derive(config))
    store = dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
    group.form(store, generation=1, rank=rank, world_size=world_size, timeout_s=_JOIN_S / 2)
    for number, shards in enumerate(trainings):
        worker = make_worker(config, shards[rank])
        collectives = GlooRank(group, rank, world_size)
        for iteration in range(1, iterations + 1):
            rollout = worker.collect(iteration)
            if poison is not None and poison[0] == rank:
                rollout = poisoned(rollout, poison[1])
            worker.update(rollout, collectives, iteration)
            worker.finish(rollout, collectives)
        live = {name: tensor.detach().clone() for name, tensor in worker.live().items()}
        live[LEARNING_RATES] = torch.tensor(worker.learning_rates, dtype=torch.float64)
        save_file(live, directory / f"{number}-{rank}.safetensors")
    (directory / f"collectives-{rank}.json").write_bytes(msgspec.json.encode(group.log))
    # As a worker does: gloo's own threads must not meet the end of the interpreter.
    os._exit(0)
