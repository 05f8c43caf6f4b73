"""Copying checkpoints from one store to another: data first, the manifest last, then all is read back."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator

from rallypoint.checkpointing import tensorfile
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.manifest import MANIFEST_FILE, CheckpointInfo
from rallypoint.checkpointing.reading import read_manifest, verify_checkpoint
from rallypoint.checkpointing.storage import Storage


def copy_checkpoint(
    source: Storage,
    target: Storage,
    info: CheckpointInfo,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CheckpointInfo:
    """Copy a checkpoint under its own name; where it is there already, in part or whole, what is missing
    is added, and nothing is overwritten. ``on_bytes`` hears of each piece that was written.

    Raises `DamagedCheckpoint` for one that does not verify, before or after, `CheckpointError` when it
    cannot be read or written, or when another file is in the way; then no manifest was put."""
    verify_checkpoint(source, info)
    manifest = read_manifest(source, info)
    there = CheckpointInfo(
        iteration=info.iteration,
        generation=info.generation,
        attempt=info.attempt,
        path=f"{target.root}/{info.directory}",
        size_bytes=info.size_bytes,
    )
    try:
        # One of a copy that was broken off, or whole: its files decide.
        with contextlib.suppress(FileExistsError):
            target.claim(info.directory)
        for name in (*manifest.files, MANIFEST_FILE):
            _copy_file(source, target, info.directory, name, on_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot copy {info.path} to {there.path}: {error}") from error
    verify_checkpoint(target, there)
    return there


def _copy_file(
    source: Storage, target: Storage, directory: str, name: str, on_bytes: Callable[[int], None]
) -> None:
    def pieces() -> Iterator[bytes]:
        for piece in _pieces(source, directory, name):
            yield piece
            on_bytes(len(piece))

    try:
        target.create(directory, name, pieces())
    except FileExistsError:
        if _digest(source, directory, name) != _digest(target, directory, name):
            raise CheckpointError(
                f"{target.root}/{directory}/{name} is there and differs from {source.root}'s; nothing was "
                "overwritten: move it away"
            ) from None


def _digest(storage: Storage, directory: str, name: str) -> bytes:
    digest = hashlib.sha256()
    for piece in _pieces(storage, directory, name):
        digest.update(piece)
    return digest.digest()


def _pieces(storage: Storage, directory: str, name: str) -> Iterator[bytes]:
    with storage.open(directory, name) as file:
        while piece := file.read(tensorfile.PIECE_BYTES):
            yield piece
