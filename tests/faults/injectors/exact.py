"""Whole runs of ``rallypoint run`` to their end, and what they end with."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared import failpoints

ROOT = Path(__file__).parents[3]
BOUND_S = 240.0
PAUSE_S = 1.5
SMALL = (
    *("env.budget=global", "env.num_envs=48", "ppo.rollout_steps=8", "ppo.epochs=2"),
    *("ppo.mini_batches=2", "ppo.hidden=[16,16]", "membership.join_debounce_s=0.1"),
    *("log.format=json", "metrics.port=0"),
)
EXACT = (*SMALL, "env.backup=node", "ppo.reduction=ordered")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    directory: Path
    killed: tuple[str, ...]
    """Failpoints that have killed a worker, in order."""

    @property
    def journal(self) -> list[dict[str, Any]]:
        lines = (self.directory / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def hashes(self) -> list[str]:
        """Of the state after each iteration."""
        return [line["state_hash"] for line in self.journal if line["event"] == "iteration"]

    @property
    def world_sizes(self) -> list[int]:
        """Of each iteration."""
        return [line["world_size"] for line in self.journal if line["event"] == "iteration"]

    def tensors(self) -> dict[str, Tensor]:
        """Shared state in the newest checkpoint: parameters, moments, learning rate, statistics."""
        return state_of(self.directory / "checkpoints")

    @property
    def sha256(self) -> str:
        """Over all of that."""
        return sha256(self.tensors())


def state_of(checkpoints: Path) -> dict[str, Tensor]:
    """Shared state in the newest of these checkpoints."""
    loaded, _ = CheckpointStore(str(checkpoints)).restore_newest()
    assert loaded is not None
    return {n: t for n, t in loaded.tensors.items() if not n.startswith("env_rows/")}


def sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(
    directory: Path, workers: int, iterations: int, settings: Sequence[str], *, faults: str = ""
) -> Run:
    """Train to this iteration with the supervisor as users start it; ``faults`` are failpoints, each of
    which fires once. A run on a directory that has one goes on with it."""
    log = directory.with_suffix(".fired")
    with directory.with_suffix(".out").open("ab") as output:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "rallypoint.daemon.cli", "run", "--dir", str(directory)),
                *("--workers", str(workers), "--iterations", str(iterations)),
                *(word for setting in settings for word in ("--set", setting)),
            ],
            stdout=output,
            stderr=output,
            timeout=BOUND_S,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
                failpoints.VARIABLE: faults,
                failpoints.LOG_VARIABLE: str(log),
            },
        )
    assert ended.returncode == 0, directory.with_suffix(".out").read_text()[-6000:]
    lines = log.read_text().splitlines() if log.exists() else []
    fired = [line.split(" ")[0] for line in lines]
    return Run(directory, tuple(entry for entry in fired if entry.endswith("=kill")))


def pauses(*iterations: int) -> str:
    """Failpoints that hold rank 0 up in these iterations, so that lost workers are back by the next."""
    return ",".join(f"rollout:0@{i}=sleep={PAUSE_S}" for i in iterations)
