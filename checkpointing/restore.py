"""Load a checkpoint from wherever a user points: a checkpoint, a directory of them, or a run."""

from pathlib import Path

from rallypoint.checkpointing import manifest as manifests
from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import MANIFEST_FILE, CheckpointInfo
from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.reading import LoadedCheckpoint
from rallypoint.checkpointing.storage import LocalStorage
from rallypoint.checkpointing.store import CheckpointStore

__all__ = ["LoadedCheckpoint", "find", "load_checkpoint", "nothing_at"]


def load_checkpoint(path_or_url: str, credentials_file: str | None = None) -> LoadedCheckpoint:
    """The newest checkpoint that verifies at ``path_or_url`` (see `find`); newer ones that do not
    are in ``skipped``. ``credentials_file`` as in `Credentials`.

    Raises `UnsupportedUrl` for another kind of URL, `DamagedCheckpoint` when none of those that are
    there verifies, `CheckpointError` when there is none."""
    store, infos = find(path_or_url, credentials_file)
    loaded, skipped = store.load_newest(infos)
    if loaded is not None:
        return loaded
    if skipped:
        raise DamagedCheckpoint(f"{path_or_url}: nothing here verifies: {'; '.join(skipped)}")
    raise nothing_at(path_or_url)


def nothing_at(path_or_url: str, what: str = "no committed checkpoint") -> CheckpointError:
    """The error that says so, and what could be given."""
    return CheckpointError(
        f"{path_or_url}: {what}; give a checkpoint (a directory with {MANIFEST_FILE}), a directory of "
        "checkpoints, or the directory of a run"
    )


def find(
    path_or_url: str, credentials_file: str | None = None
) -> tuple[CheckpointStore, list[CheckpointInfo]]:
    """What is at a checkpoint's directory (whatever its name), at a directory of checkpoints, or at
    a run's directory, which has its checkpoints in ``checkpoints``: newest first, not verified.
    Raises `CheckpointError` for a file, and where nothing can be listed."""
    storage = open_storage(path_or_url)
    root = storage.root
    if isinstance(storage, LocalStorage) and Path(root).is_file():
        raise nothing_at(path_or_url, "a file")
    base, _, name = root.rpartition("/")
    if name and not base.endswith("/"):  # else there is nothing above it
        store = CheckpointStore(base or "/", credentials_file=credentials_file)
        info = _single(store, name)
        if info is not None:
            return store, [info]
    store = CheckpointStore(root, credentials_file=credentials_file)
    infos = store.list()
    if infos:
        return store, infos
    store = CheckpointStore(f"{root}/checkpoints", credentials_file=credentials_file)
    return store, store.list()


def _single(store: CheckpointStore, name: str) -> CheckpointInfo | None:
    if manifests.parse_directory_name(name):
        return next((info for info in store.list() if info.directory == name), None)
    return store.describe(name)
