"""The state registry: every owner of training state registers it here, with its scope.

Broadcast, hash, snapshot, checkpoint and hand-over read only the registry, so that no state can be
forgotten by one of them. An entry is a function that returns *live* tensors by name: they are read
in place, and written in place with ``copy_``; a tensor is never replaced by another object.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.errors import StateMismatch


class Scope(Enum):
    """Whose the state is, and so what a membership change does to it."""

    REPLICATED = "replicated"
    """The same on every rank: parameters, optimiser moments, learning rate, counters."""
    GLOBAL = "global"
    """One global value that per-rank deltas are merged into once per iteration."""
    ENV_ROWS = "env_rows"
    """One row per env, keyed by global env id; belongs to whoever owns the env."""
    SHARD = "shard"
    """Belongs to one rank (a replay buffer)."""


@dataclass(frozen=True)
class Entry:
    """Some state of one owner."""

    name: str
    scope: Scope
    tensors: Callable[[], Mapping[str, Tensor]]
    """Live tensors by name; names, shapes and dtypes never change during the life of the worker."""


@dataclass(frozen=True)
class RowsEntry:
    """Per-env state of one owner (`Scope.ENV_ROWS`). The rows change with the envs that are owned, so
    they are copied out and in."""

    name: str
    read: Callable[[], Mapping[str, Tensor]]
    """Copies, ``[N, ...]`` each, in the order of the owned env ids (ascending)."""
    write: Callable[[NDArray[np.int64], Mapping[str, Tensor]], None]
    """Put such rows into these envs, which are owned."""


class StateRegistry:
    """All entries of one worker."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._rows: dict[str, RowsEntry] = {}

    def register(
        self, name: str, scope: Scope, tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Add an entry. Raises ValueError when the name is taken."""
        self._check_new(name)
        self._entries[name] = Entry(name, scope, tensors)

    def register_rows(
        self,
        name: str,
        read: Callable[[], Mapping[str, Tensor]],
        write: Callable[[NDArray[np.int64], Mapping[str, Tensor]], None],
    ) -> None:
        """Add an entry of `Scope.ENV_ROWS`. Raises ValueError when the name is taken."""
        self._check_new(name)
        self._rows[name] = RowsEntry(name, read, write)

    def _check_new(self, name: str) -> None:
        if name in self._entries or name in self._rows:
            raise ValueError(f"the state registry already has an entry named {name!r}")

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries[name] for name in sorted(self._entries))

    def shared(self) -> dict[str, Tensor]:
        """Live tensors that are the same on every rank (replicated and global), as
        ``entry/tensor``, in an order that does not depend on registration."""
        return dict(self._walk(Scope.REPLICATED, Scope.GLOBAL))

    def read_rows(self) -> dict[str, Tensor]:
        """Copies of the rows of all owned envs, as ``entry/tensor``."""
        return {
            f"{entry.name}/{name}": tensor
            for entry in self._rows.values()
            for name, tensor in entry.read().items()
        }

    def write_rows(self, env_ids: NDArray[np.int64], rows: Mapping[str, Tensor]) -> None:
        """Put what `read_rows` gave into these envs, which are owned, in the order of the rows."""
        for entry in self._rows.values():
            mine = {k: v for k, v in rows.items() if k.startswith(f"{entry.name}/")}
            entry.write(env_ids, {k.removeprefix(f"{entry.name}/"): v for k, v in mine.items()})

    def scope_of(self, full_name: str) -> Scope:
        """Scope of a tensor named as in `shared`."""
        return self._entries[full_name.split("/", 1)[0]].scope

    def _walk(self, *scopes: Scope) -> Iterator[tuple[str, Tensor]]:
        for entry in self.entries():
            if entry.scope in scopes:
                tensors = entry.tensors()
                for name in sorted(tensors):
                    yield f"{entry.name}/{name}", tensors[name]


class PackedState:
    """A copy of the shared state in one contiguous byte buffer with a fixed layout, on the CPU; pinned
    where some of the state is on a GPU, so that copies run at the speed of the bus."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._layout: list[tuple[str, int, int, torch.dtype, torch.Size]] = []
        offset = 0
        for name, tensor in live.items():
            size = tensor.numel() * tensor.element_size()
            self._layout.append((name, offset, size, tensor.dtype, tensor.shape))
            offset += -(-size // 16) * 16  # so that every view is aligned for its dtype
        devices = [tensor.device for tensor in live.values() if tensor.is_cuda]
        self._device = devices[0] if devices else None
        self.buffer = torch.zeros(offset, dtype=torch.uint8, pin_memory=bool(devices))
        self._views = {
            name: self.buffer[start : start + size].view(dtype).view(shape)
            for name, start, size, dtype, shape in self._layout
        }

    @property
    def size_bytes(self) -> int:
        return self.buffer.numel()

    def tensors(self) -> dict[str, Tensor]:
        """Views into the buffer, by full name."""
        return dict(self._views)

    def fill_from(self, live: Mapping[str, Tensor]) -> None:
        """Copy live tensors into the buffer. Raises `StateMismatch` if names or shapes differ."""
        self._check(live)
        for name, tensor in live.items():
            self._views[name].copy_(tensor.detach(), non_blocking=True)
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def load_into(self, live: Mapping[str, Tensor]) -> None:
        """Copy the buffer into live tensors, in place."""
        self._check(live)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(self._views[name])

    def copy_from(self, other: "PackedState") -> None:
        self.buffer.copy_(other.buffer)

    def hash(self) -> int:
        """64-bit hash of every byte, as a signed integer (so that it fits an int64 tensor)."""
        digest = hashlib.blake2b(self.buffer.numpy().data, digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _check(self, live: Mapping[str, Tensor]) -> None:
        expected = {name: (dtype, shape) for name, _, _, dtype, shape in self._layout}
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in live.items()}
        if expected != found:
            wrong = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
            raise StateMismatch(
                f"state does not fit the layout of this job: {', '.join(sorted(wrong)[:5])} "
                f"(expected {[expected.get(n) for n in sorted(wrong)[:5]]}, "
                f"found {[found.get(n) for n in sorted(wrong)[:5]]})"
            )


def hash_text(value: int) -> str:
    """A state hash as 16 hexadecimal digits."""
    return f"{value & (2**64 - 1):016x}"
