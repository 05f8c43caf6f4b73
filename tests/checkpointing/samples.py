"""States, metadata and storages for the tests of checkpointing."""

import errno
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rallypoint.checkpointing.manifest import CheckpointInfo, CheckpointMeta
from rallypoint.checkpointing.reading import LoadedCheckpoint
from rallypoint.checkpointing.storage import Buffer, LocalStorage
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict


def allowed() -> CommitVerdict:
    """The answer of a supervisor that has nothing against it."""
    return CommitVerdict(True)


def state(value: float = 0.0) -> dict[str, Tensor]:
    """A small state that differs for every ``value``."""
    return {
        "policy/weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) + value,
        "statistics/count": torch.tensor(int(value), dtype=torch.int64),
    }


def scopes(tensors: Iterable[str]) -> dict[str, str]:
    """A scope for every tensor."""
    return dict.fromkeys(tensors, "replicated")


def meta(iteration: int, generation: int = 1, job: str = "walk") -> CheckpointMeta:
    """Metadata of a job at that moment."""
    return CheckpointMeta(
        job=job,
        job_uid="uid-1",
        iteration=iteration,
        generation=generation,
        env_steps=iteration * 100,
        world_size=2,
        budget="global",
        config_hash="abc",
        config={"job": {"name": job}, "env": {}, "ppo": {"hidden": [32, 32]}},
        versions={"torch": "2"},
        metrics={"return_mean": 1.5},
    )


def commit(store: CheckpointStore, iteration: int, generation: int = 1) -> CheckpointInfo:
    """Save `state` of ``iteration``."""
    tensors = state(iteration)
    return store.save(tensors, scopes(tensors), meta(iteration, generation), may_commit=allowed)


def commit_of_another_job(root: Path, base: Path) -> CheckpointInfo:
    """A checkpoint of job ``crawl``, newer than any of ``walk``, that somebody copied below ``root``."""
    tensors, about = state(99), meta(99, 50, "crawl")
    made = CheckpointStore(str(base)).save(tensors, scopes(tensors), about, may_commit=allowed)
    copied = shutil.copytree(made.path, root / made.directory)
    return replace(made, path=str(copied))


def newest(store: CheckpointStore) -> LoadedCheckpoint:
    """What a restart would restore."""
    loaded, _ = store.restore_newest()
    assert loaded is not None
    return loaded


def assert_state(loaded: LoadedCheckpoint, iteration: int) -> None:
    """The checkpoint is of ``iteration``, and holds its state, bit for bit."""
    assert loaded.manifest.iteration == iteration
    expected = state(iteration)
    assert loaded.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded.tensors[name], tensor), name


class FullDisk(LocalStorage):
    """A disk without space for some files while ``full`` says so."""

    def __init__(self, root: Path, full: Callable[[str], bool]) -> None:
        super().__init__(root)
        self.full = full

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        def some() -> Iterable[Buffer]:
            for part in parts:
                yield part[: len(part) // 2]
                if self.full(name):
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield part[len(part) // 2 :]

        super().create(directory, name, some())


class ReadOnlyRemoval(LocalStorage):
    """A storage on which nothing can be removed while ``refuses`` says so."""

    refuses = True

    def remove(self, directory: str, names: Iterable[str]) -> None:
        if self.refuses:
            raise PermissionError(errno.EACCES, "Permission denied")
        super().remove(directory, names)
