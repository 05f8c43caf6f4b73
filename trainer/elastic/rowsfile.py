"""Env rows in files of a slot: shared memory of a node that outlives the process that wrote it.

Each slot has two files, used in turn: even and odd iterations. A process that is killed while it writes
one leaves the other whole, and a checksum tells which is. Files are written into the page cache and
never synced: they survive a process, not a machine.
"""

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.checkpointing import tensorfile

_MAGIC: Final = b"RPROWS01"
_DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<8sqq{_DIGEST_BYTES}s")  # magic, iteration, body bytes, checksum
ENV_IDS: Final = "env_ids"

Rows = Mapping[str, Tensor]
"""State of some envs, ``[N, ...]`` each, by name."""


class RowsFiles:
    """The files of all slots of a node; one slot writes its own and reads all."""

    def __init__(self, directory: Path, slot: int) -> None:
        self._directory = directory
        self._slot = slot

    def save(self, lineage: str, iteration: int, env_ids: NDArray[np.int64], rows: Rows) -> None:
        """Keep the rows with which ``iteration + 1`` begins, until those of ``iteration + 2`` are
        saved. ``lineage`` says of which run; ``rows`` are of ``env_ids``."""
        self._write(f"{self._slot}", lineage, iteration, env_ids, rows)

    def receive(self, lineage: str, iteration: int, env_ids: NDArray[np.int64], rows: Rows) -> None:
        """Keep rows that came from another node, beside those of `save`."""
        self._write(f"{self._slot}-received", lineage, iteration, env_ids, rows)

    def gather(self, lineage: str, iteration: int, env_ids: NDArray[np.int64], rows: Rows) -> None:
        """Keep rows of other nodes for a checkpoint, beside those of `save` and `receive`."""
        self._write(f"{self._slot}-gathered", lineage, iteration, env_ids, rows)

    def _write(
        self, name: str, lineage: str, iteration: int, env_ids: NDArray[np.int64], rows: Rows
    ) -> None:
        tensors = {**rows, ENV_IDS: torch.from_numpy(env_ids)}
        digest = _digest(lineage, iteration)
        size = 0
        path = self._directory / f"{name}.rows.{iteration % 2}"
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.write(bytes(_HEADER.size))  # no whole file until the header is there
            for piece in tensorfile.stream(tensors):
                digest.update(piece)
                size += file.write(piece)
            file.truncate()
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, iteration, size, digest.digest()))

    def find(
        self, lineage: str, iteration: int, env_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[str, Tensor]]:
        """Those of these envs whose rows of exactly this safe point any slot has, and the rows."""
        found: list[NDArray[np.int64]] = []
        parts: list[dict[str, Tensor]] = []
        for path in sorted(self._directory.glob(f"*.rows.{iteration % 2}")):
            tensors = _read(path, lineage, iteration)
            if tensors is not None:
                ids = tensors.pop(ENV_IDS).numpy()
                wanted = np.flatnonzero(np.isin(ids, env_ids) & ~np.isin(ids, _joined(found)))
                if wanted.size:
                    found.append(ids[wanted])
                    parts.append({k: v[torch.from_numpy(wanted)] for k, v in tensors.items()})
        names = parts[0] if parts else {}
        return _joined(found), {name: torch.cat([part[name] for part in parts]) for name in names}


def _read(path: Path, lineage: str, iteration: int) -> dict[str, Tensor] | None:
    """The tensors of a whole file of this safe point; None for any other."""
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        return None
    magic, of_iteration, size, digest = _HEADER.unpack_from(data)
    if (magic, of_iteration, size) != (_MAGIC, iteration, len(data) - _HEADER.size):
        return None
    body = memoryview(data)[_HEADER.size :]
    hasher = _digest(lineage, iteration)
    hasher.update(body)
    if hasher.digest() != digest:
        return None  # of another lineage, or its writer was killed while it wrote
    aligned = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return tensorfile.parse(aligned, str(path))


def _digest(lineage: str, iteration: int) -> "hashlib.blake2b":
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    hasher.update(f"{lineage}/{iteration}".encode())
    return hasher


def _joined(ids: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *ids])
