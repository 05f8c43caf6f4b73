"""Checkpoints of simulated ranks."""

from pathlib import Path

import msgspec
import torch

from rallypoint.checkpointing.manifest import CheckpointMeta
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import RECORDED
from tests.fakes.training import Worker


def save(directory: Path, worker: Worker, settings: Config, iteration: int = 1) -> Path:
    """Commit the worker's state, as a run does; the checkpoint's directory."""
    resolved = msgspec.to_builtins(settings)
    meta = CheckpointMeta(
        job="walk",
        job_uid="uid",
        iteration=iteration,
        generation=1,
        env_steps=1,
        world_size=1,
        budget="per_rank",
        config_hash="0",
        config={section: resolved[section] for section in RECORDED},
        versions={},
    )
    live = {name: tensor.detach() for name, tensor in worker.live().items()}
    scopes = {name: worker.registry.scope_of(name).value for name in live}
    # A run's other state is in its checkpoints too.
    live["progress/iteration"] = torch.tensor(iteration)
    scopes["progress/iteration"] = "replicated"
    store = CheckpointStore(str(directory))
    return Path(store.save(live, scopes, meta, may_commit=lambda: CommitVerdict(True)).path)
