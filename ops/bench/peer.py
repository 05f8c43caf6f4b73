"""The peer of the recovery benchmark: a plain DDP loop under torchrun, one worker killed.

As a module this drives the peer; as a program (``python -m torch.distributed.run … peer.py LOG
SECONDS BACKEND``) it is one of its workers. Nothing here is used by the product.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rallypoint.ops.bench import processes
from rallypoint.ops.bench.processes import Deadline

if TYPE_CHECKING:
    from torch import nn

WARM_UP_BOUND_S: Final = 120.0
BOUND_S: Final = 60.0
"""How long a kill is waited for."""
CALM_S: Final = 2.0
_POLL_S: Final = 0.02
LIFE_S: Final = WARM_UP_BOUND_S + CALM_S + 2 * BOUND_S
"""A worker ends by itself after this, whatever becomes of its agent."""


@dataclass(frozen=True)
class PeerKill:
    """One kill under torchrun; None where it was not seen within `BOUND_S`."""

    any_s: float | None
    """From the kill to the first step of any rank of a later attempt."""
    all_s: float | None
    """From the kill to the moment at which every rank of one attempt had made its first step."""
    attempts: int
    """Restarts of all workers that were seen to train."""


def measure(directory: Path, workers: int, seed: int, backend: str = "gloo") -> PeerKill:
    """Start ``torchrun --max-restarts 3`` with this many workers, kill one, and wait. With ``nccl`` each
    has the GPU of its local rank.

    Raises `BenchError` when it does not even begin to train."""
    log, steps = directory / "torchrun.log", directory / "steps.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"),
        *(f"--nproc-per-node={workers}", __file__, str(steps)),
        *(str(LIFE_S), backend),
    ]
    agent = processes.start(command, log)
    try:
        deadline = Deadline("training under torchrun", WARM_UP_BOUND_S, log)
        while len(first := first_steps(steps)) < workers:
            deadline.check()
            time.sleep(_POLL_S)
        time.sleep(CALM_S)
        victim = random.Random(seed).choice(first)  # noqa: S311 - draws a victim, no secret
        kill_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        while time.monotonic() < kill_s + BOUND_S and agent.poll() is None:
            if summarise(first_steps(steps), kill_s, workers).all_s is not None:
                break
            time.sleep(_POLL_S)
        return summarise(first_steps(steps), kill_s, workers)
    finally:
        processes.end(agent, 15.0)
        end_workers(first_steps(steps))


def summarise(steps: Sequence[dict[str, Any]], kill_s: float, workers: int) -> PeerKill:
    """What the first steps of all lives of all ranks say about a kill."""
    by_attempt: dict[int, list[float]] = {}
    for step in steps:
        if step["at_s"] > kill_s:
            by_attempt.setdefault(step["attempt"], []).append(step["at_s"] - kill_s)
    return PeerKill(
        any_s=min((min(seconds) for seconds in by_attempt.values()), default=None),
        all_s=min((max(s) for s in by_attempt.values() if len(s) == workers), default=None),
        attempts=len(by_attempt),
    )


def first_steps(path: Path) -> list[dict[str, Any]]:
    """The first step of each life of each rank, as far as they are written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def end_workers(steps: Sequence[dict[str, Any]]) -> None:
    """SIGKILL to workers that the agent may have left, if they are still the peer's."""
    for pid in {step["pid"] for step in steps}:
        try:
            if __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


def small_network() -> "nn.Module":
    """A policy of the size that the default task has."""
    from torch import nn

    return nn.Sequential(
        *(nn.Linear(48, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU(), nn.Linear(128, 12))
    )


def train(log: Path, seconds: float, backend: str) -> None:
    """One rank: mini-batches of the size that a worker of the default task has, until its time is
    over; the first step of this life goes to ``log``."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    end_s = time.monotonic() + seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    model = small_network().to(device)
    module = DistributedDataParallel(model)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
    first = True
    while time.monotonic() < end_s:
        optimiser.zero_grad()
        module(torch.randn(768, 48, device=device)).square().mean().backward()
        optimiser.step()
        if first:
            if backend == "nccl":
                torch.cuda.synchronize()
            first = False
            step = {
                "pid": os.getpid(),
                "rank": dist.get_rank(),
                "world": dist.get_world_size(),
                "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "at_s": time.monotonic(),
            }
            with log.open("a") as file:
                file.write(json.dumps(step) + "\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
