"""Ways to save a state to one place, each in a process of its own: ``python -m
rallypoint.ops.bench.checkpoint_run PLACE BYTES SAVES DEVICE METHOD…`` prints a line with a `Saves` as JSON
for each, as it ends. They are forks of one process, so that torch is imported once."""

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import fsspec
import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from rallypoint.checkpointing.manifest import CheckpointMeta
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from rallypoint.checkpointing.writer import CheckpointWriter, SaveDone, SaveFailed, Snapshot
from rallypoint.ops.bench.processes import BenchError
from rallypoint.trainer.elastic.copies import SnapshotCopies

BOUND_S: Final = 600.0
_ENOUGH_S: Final = 10.0
"""After this no further save of a method begins: a slow store ends in time, too, timed by its first."""
_BATCH: Final = 768  # samples of a mini-batch of the default job
_STEPS: Final = 20  # optimiser steps of one of its iterations
_TIMED_STEPS: Final = 4
_WIDTH: Final = 1024


class Saves(msgspec.Struct):
    """What one method took, save by save."""

    stall_s: list[float]
    """How long the loop stood still."""
    persist_s: list[float]
    """From the call until the state is durable there."""
    peak_extra_bytes: int
    """Greatest resident memory of the host above what it was with the live state alone."""
    state_bytes: int
    iteration_s: float | None = None
    """``iteration``: one iteration of training of a network whose state this is."""


class Trained:
    """A network whose parameters and moments are as large as asked, and its optimiser."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        layers = max(1, round(size_bytes / 3 / 4 / _WIDTH / (_WIDTH + 1)))
        linear = [torch.nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(layers)]
        self.net = torch.nn.Sequential(*linear)
        self.optimiser = torch.optim.Adam(self.net.parameters(), fused=True)
        self._data = torch.randn(_BATCH, _WIDTH, device=device)
        self.step()

    def step(self) -> None:
        """One optimiser step."""
        self.optimiser.zero_grad()
        self.net(self._data).square().mean().backward()
        self.optimiser.step()

    def live(self) -> dict[str, Tensor]:
        """Parameters and moments."""
        found = {f"model/{name}": p.detach() for name, p in self.net.named_parameters()}
        for name, parameter in self.net.named_parameters():
            state = self.optimiser.state[parameter]
            found |= {f"optimiser/{kind}/{name}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
        return found


Save = Callable[[int], tuple[float, float]]
"""(stall, persist) of save number so-and-so, in seconds."""


def _copy(live: dict[str, Tensor], place: str) -> Save:
    """The bytes alone, from a file to the store."""
    source = Path(os.environ.get("TMPDIR", "/tmp"), f"raw-{os.getpid()}")  # noqa: S108 - ours
    with source.open("wb") as file:
        for tensor in live.values():
            file.write(tensor.cpu().numpy().data)

    def save(number: int) -> tuple[float, float]:
        began_s = time.perf_counter()
        if "://" in place:
            fs, path = fsspec.core.url_to_fs(place)
            fs.put_file(str(source), f"{path}/raw-{number}")
        else:
            with source.open("rb") as read, Path(place, f"raw-{number}").open("wb") as write:
                shutil.copyfileobj(read, write, 2**20)
                write.flush()
                os.fsync(write.fileno())
            _sync(place)
        took_s = time.perf_counter() - began_s
        return took_s, took_s

    return save


def _sync(directory: str) -> None:
    """What ours does too: without it the file's name is not durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _torch_save(live: dict[str, Tensor], place: str) -> Save:
    def save(number: int) -> tuple[float, float]:
        began_s = time.perf_counter()
        with fsspec.open(f"{place}/torch-{number}.pt", "wb") as file:
            torch.save(live, file)
            if "://" not in place:
                file.flush()
                os.fsync(file.fileno())
                _sync(place)
        took_s = time.perf_counter() - began_s
        return took_s, took_s

    return save


def _dcp_async(live: dict[str, Tensor], place: str) -> Save:
    def save(number: int) -> tuple[float, float]:
        writer: Any = FsspecWriter if "://" in place else FileSystemWriter
        began_s = time.perf_counter()
        future: Any = async_save(
            dict(live), storage_writer=writer(f"{place}/dcp-{number}"), no_dist=True
        )
        stall_s = time.perf_counter() - began_s
        future.result(BOUND_S)
        return stall_s, time.perf_counter() - began_s

    return save


def _ours(live: dict[str, Tensor], place: str) -> Save:
    """As a worker does it: a commit into a copy, which is lent; training commits on meanwhile."""
    outcomes: list[SaveDone | SaveFailed] = []
    writer = CheckpointWriter(
        CheckpointStore(f"{place}/ours"),
        may_commit=lambda generation, iteration: CommitVerdict(True),
        on_done=outcomes.append,
        on_failed=outcomes.append,
        keep_last=1,
    )
    copies = SnapshotCopies(live)

    def save(number: int) -> tuple[float, float]:
        began_s = time.perf_counter()
        copies.fill_from(live)
        lent, release = copies.lend()
        scopes = dict.fromkeys(live, "replicated")
        writer.submit(Snapshot(lent.tensors(), scopes, release), _meta(number))
        stall_s = time.perf_counter() - began_s
        copies.fill_from(live)
        if not writer.flush(BOUND_S):
            raise BenchError(f"{place}: not saved within {BOUND_S:g} s")
        done = outcomes[-1]
        if isinstance(done, SaveFailed):
            raise BenchError(f"{place}: {done.error}")
        return stall_s, stall_s + done.persist_s

    return save


def _meta(number: int) -> CheckpointMeta:
    return CheckpointMeta(
        job="bench",
        job_uid="bench",
        iteration=number,
        generation=1,
        env_steps=0,
        world_size=1,
        budget="per_rank",
        config_hash="",
        config={},
        versions={},
    )


METHODS: Final[dict[str, Callable[[dict[str, Tensor], str], Save]]] = {
    "raw copy": _copy,
    "ours": _ours,
    "torch.save": _torch_save,
    "DCP async_save": _dcp_async,
}


def measure(method: str, place: str, size_bytes: int, saves: int, device: str) -> Saves:
    """The first save, which allocates, is not timed where there is time for others; its memory counts."""
    trained = Trained(size_bytes, torch.device(device))
    live = trained.live()
    save = METHODS[method](live, place)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    timed = list(_timed(save, saves))
    return Saves(
        stall_s=[stall_s for stall_s, _ in timed],
        persist_s=[persist_s for _, persist_s in timed],
        peak_extra_bytes=max(0, _resident("VmHWM") - before),
        state_bytes=sum(tensor.nbytes for tensor in live.values()),
        iteration_s=_iteration_s(trained, device) if method == "ours" else None,
    )


def _timed(save: Save, saves: int) -> Iterator[tuple[float, float]]:
    enough_s = time.perf_counter() + _ENOUGH_S
    for number in range(saves + 1):
        took = save(number)
        is_enough = time.perf_counter() > enough_s
        if number or is_enough:
            yield took
        if is_enough:
            return


def _iteration_s(trained: Trained, device: str) -> float:
    began_s = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        trained.step()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - began_s) * _STEPS / _TIMED_STEPS


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/self/status has no {key}")


def main(place: str, size_bytes: str, saves: str, device: str, *methods: str) -> None:
    """Measure them in turn. Raises SystemExit when one fails; its process has said why."""
    fork = multiprocessing.get_context("fork")

    def report(method: str) -> None:
        took = measure(method, place, int(size_bytes), int(saves), device)
        print(msgspec.json.encode(took).decode(), flush=True)

    for method in methods:
        child = fork.Process(target=report, args=(method,))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"{method}: exit code {child.exitcode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
