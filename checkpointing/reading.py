"""Reading one checkpoint: nothing is trusted before its files verify against its manifest."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rallypoint.checkpointing import manifest as manifests
from rallypoint.checkpointing import tensorfile
from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CheckpointInfo,
    FileRecord,
    Manifest,
)
from rallypoint.checkpointing.storage import ReadableFile, Storage


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that verified."""

    info: CheckpointInfo
    manifest: Manifest
    tensors: dict[str, Tensor]
    """On the CPU, by the names that the manifest's ``entries`` describe (``entry/tensor``)."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that did not verify, each with why. Whoever loads must say so."""


def read_manifest(storage: Storage, info: CheckpointInfo) -> Manifest:
    """The manifest of a checkpoint, which must agree with the directory's name.

    Raises `DamagedCheckpoint` for a bad one, `CheckpointError` for one that cannot be read."""
    manifest = load_manifest(storage, info.directory, info.path)
    said = (manifest.iteration, manifest.generation, manifest.attempt)
    if said != (info.iteration, info.generation, info.attempt):
        raise DamagedCheckpoint(
            f"{info.path}/{MANIFEST_FILE}: speaks of (iteration, generation, attempt) {said}, but "
            f"the directory's name says {(info.iteration, info.generation, info.attempt)}"
        )
    return manifest


def load_manifest(storage: Storage, directory: str, path: str) -> Manifest:
    """The manifest in ``directory``, whose full path is ``path``. Raises as `read_manifest`."""
    with _opened(storage, directory, MANIFEST_FILE, path, MAX_MANIFEST_BYTES) as (file, _):
        data = file.read() or b""
    return manifests.decode(data, f"{path}/{MANIFEST_FILE}")


def read_checkpoint(storage: Storage, info: CheckpointInfo) -> LoadedCheckpoint:
    """Read and verify everything: sizes, checksums, and every tensor against its entry.

    Raises `DamagedCheckpoint` naming the file and what differs, `CheckpointError` for what cannot
    be read."""
    manifest = read_manifest(storage, info)
    tensors: dict[str, Tensor] = {}
    for name, record in manifest.files.items():
        path = f"{info.path}/{name}"
        with _opened(storage, info.directory, name, info.path, record.size_bytes) as (file, size):
            data = torch.empty(size, dtype=torch.uint8)
            _require(record, *_digest(file, data.numpy().data), path)
        found = tensorfile.parse(data, path)
        held = {n: (tensorfile.dtype_name(n, t), tuple(t.shape)) for n, t in found.items()}
        _check_tensors(held, manifest, name, path)
        tensors.update(found)
    return LoadedCheckpoint(info, manifest, tensors)


def verify_checkpoint(storage: Storage, info: CheckpointInfo) -> None:
    """As `read_checkpoint`, keeping nothing: whatever the size, it takes the memory of a piece."""
    manifest = read_manifest(storage, info)
    for name, record in manifest.files.items():
        path = f"{info.path}/{name}"
        with _opened(storage, info.directory, name, info.path, record.size_bytes) as (file, size):
            head = tensorfile.read_header(file, size)
            file.seek(0)
            _require(record, *_digest(file, memoryview(bytearray(tensorfile.PIECE_BYTES))), path)
        places = tensorfile.layout(head, size, path)
        held = {n: (tensorfile.DTYPE_NAMES[at.dtype], at.shape) for n, at in places.items()}
        _check_tensors(held, manifest, name, path)


def _require(record: FileRecord, size_bytes: int, checksum: str, path: str) -> None:
    if size_bytes != record.size_bytes:
        raise DamagedCheckpoint(
            f"{path}: has {size_bytes} bytes, its manifest says {record.size_bytes}"
        )
    if checksum != record.checksum:
        raise DamagedCheckpoint(f"{path}: is {checksum}, its manifest says {record.checksum}")


def _digest(file: ReadableFile, into: memoryview) -> tuple[int, str]:
    """(bytes, checksum) of what is left of a file, read into ``into`` (again from its beginning, when it
    is full), each piece hashed while it is in the cache."""
    digest, done = hashlib.sha256(), 0
    while True:
        begin = done % max(1, len(into))
        count = file.readinto(into[begin : begin + tensorfile.PIECE_BYTES])
        if not count:
            return done, f"sha256-{digest.hexdigest()}"
        digest.update(into[begin : begin + count])
        done += count


@contextlib.contextmanager
def _opened(
    storage: Storage, directory: str, name: str, parent: str, limit_bytes: int
) -> Iterator[tuple[ReadableFile, int]]:
    """A file at its beginning, and its size. Memory is to be taken for what it has, not for what somebody
    claims. Raises as `read_checkpoint`, also for what happens to it later."""
    try:
        with storage.open(directory, name) as file:
            size = file.seek(0, os.SEEK_END)
            if size > limit_bytes:
                raise DamagedCheckpoint(
                    f"{parent}/{name}: has {size} bytes, at most {limit_bytes} expected"
                )
            file.seek(0)
            yield file, size
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{parent}/{name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {parent}/{name}: {error}") from error


def _check_tensors(
    held: Mapping[str, tuple[str, tuple[int, ...]]], manifest: Manifest, name: str, path: str
) -> None:
    said = {
        key: (entry.dtype, entry.shape)
        for key, entry in manifest.entries.items()
        if entry.file == name
    }
    wrong = sorted(key for key in said.keys() | held.keys() if said.get(key) != held.get(key))
    if wrong:
        key = wrong[0]
        raise DamagedCheckpoint(
            f"{path}: holds {key!r} as {held.get(key, 'nothing')}, its manifest says "
            f"{said.get(key, 'nothing')} ({len(wrong)} tensors differ)"
        )
