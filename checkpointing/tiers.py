"""The newest checkpoint over several stores: local disk and a remote URL, say."""

from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import CheckpointInfo
from rallypoint.checkpointing.reading import LoadedCheckpoint
from rallypoint.checkpointing.store import CheckpointStore


@dataclass(frozen=True)
class Newest:
    """What a restart would begin with, as far as can be told now."""

    loaded: LoadedCheckpoint | None
    """The newest that verifies."""
    skipped: tuple[str, ...]
    """Why each newer one is not taken. Whoever loads must say so."""
    unreadable: tuple[str, ...]
    """Those of ``skipped`` that say of a store or a checkpoint that it cannot be read: it may be sound,
    and readable later."""


def newest(stores: Iterable[CheckpointStore], job: str) -> Newest:
    """The newest checkpoint of this job that verifies, by (generation, iteration); of the same one in two
    stores, that of the earlier store."""
    found: list[tuple[CheckpointInfo, CheckpointStore]] = []
    unreadable: list[str] = []
    for store in stores:
        try:
            found += [(info, store) for info in store.list()]
        except CheckpointError as error:
            unreadable.append(str(error))
    skipped = list(unreadable)
    for info, store in sorted(found, key=lambda pair: pair[0].order, reverse=True):
        try:
            loaded = store.load(info)
            if loaded.manifest.job != job:
                raise DamagedCheckpoint(
                    f"{info.path}: is of job {loaded.manifest.job!r}, not of {job!r}"
                )
        except DamagedCheckpoint as error:
            skipped.append(str(error))
        except CheckpointError as error:
            skipped.append(str(error))
            unreadable.append(str(error))
        else:
            return Newest(loaded, tuple(skipped), tuple(unreadable))
    return Newest(None, tuple(skipped), tuple(unreadable))
