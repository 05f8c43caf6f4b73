"""Reading one checkpoint: nothing is trusted before its files verify against its manifest."""

import hashlib
import os
from collections.abc import Callable
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
    Manifest,
)
from rallypoint.checkpointing.storage import Storage


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
    data = _read(storage, directory, MANIFEST_FILE, path, MAX_MANIFEST_BYTES)
    return manifests.decode(data.numpy().tobytes(), f"{path}/{MANIFEST_FILE}")


def read_checkpoint(storage: Storage, info: CheckpointInfo) -> LoadedCheckpoint:
    """Read and verify everything: sizes, checksums, and every tensor against its entry.

    Raises `DamagedCheckpoint` naming the file and what differs, `CheckpointError` for what cannot
    be read."""
    manifest = read_manifest(storage, info)
    tensors: dict[str, Tensor] = {}
    for name, record in manifest.files.items():
        path = f"{info.path}/{name}"
        digest = hashlib.sha256()
        data = _read(storage, info.directory, name, info.path, record.size_bytes, digest.update)
        if data.numel() != record.size_bytes:
            raise DamagedCheckpoint(
                f"{path}: has {data.numel()} bytes, its manifest says {record.size_bytes}"
            )
        checksum = f"sha256-{digest.hexdigest()}"
        if checksum != record.checksum:
            raise DamagedCheckpoint(f"{path}: is {checksum}, its manifest says {record.checksum}")
        found = tensorfile.parse(data, path)
        _check_tensors(found, manifest, name, path)
        tensors.update(found)
    return LoadedCheckpoint(info, manifest, tensors)


def _read(
    storage: Storage,
    directory: str,
    name: str,
    parent: str,
    limit_bytes: int,
    update: Callable[[memoryview], None] = lambda piece: None,
) -> Tensor:
    """The bytes of a file (uint8), each piece shown to ``update`` while it is in the cache. Memory
    is taken for what the file has, not for what somebody claims, and not cleared first."""
    try:
        with storage.open(directory, name) as file:
            size = file.seek(0, os.SEEK_END)
            if size > limit_bytes:
                raise DamagedCheckpoint(
                    f"{parent}/{name}: has {size} bytes, at most {limit_bytes} expected"
                )
            file.seek(0)
            data = torch.empty(size, dtype=torch.uint8)
            view, done = data.numpy().data, 0
            while done < size and (
                count := file.readinto(view[done : done + tensorfile.PIECE_BYTES])
            ):
                update(view[done : done + count])
                done += count
            return data[:done]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{parent}/{name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {parent}/{name}: {error}") from error


def _check_tensors(found: dict[str, Tensor], manifest: Manifest, name: str, path: str) -> None:
    said = {
        key: (entry.dtype, entry.shape)
        for key, entry in manifest.entries.items()
        if entry.file == name
    }
    held = {
        key: (tensorfile.dtype_name(key, tensor), tuple(tensor.shape))
        for key, tensor in found.items()
    }
    wrong = sorted(key for key in said | held if said.get(key) != held.get(key))
    if wrong:
        key = wrong[0]
        raise DamagedCheckpoint(
            f"{path}: holds {key!r} as {held.get(key, 'nothing')}, its manifest says "
            f"{said.get(key, 'nothing')} ({len(wrong)} tensors differ)"
        )
