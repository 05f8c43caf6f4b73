"""Tensors to and from the safetensors format.

A file is a header length (8 bytes, little endian), a JSON header and the tensors' raw bytes (as the
documentation of safetensors has it under "Format"). Done here and not by the library, so that a
save streams from the tensors' own memory and hashes what it writes, a load copies nothing, and
neither holds the interpreter lock for long while training goes on beside it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import torch
from torch import Tensor

from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint, NonFiniteState
from rallypoint.checkpointing.storage import Buffer, ReadableFile

PIECE_BYTES: Final = 2**20
"""Read, written and hashed at once, while it is in the cache."""

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class _Header(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def dtype_name(name: str, tensor: Tensor) -> str:
    """safetensors name of the tensor's number type. Raises `CheckpointError` for one that
    checkpoints do not hold."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype}; checkpoints hold only "
            f"{', '.join(str(dtype) for dtype in DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[tensor.dtype]


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise `NonFiniteState` if a tensor holds NaN or infinity, naming it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            # One pass without a temporary of the tensor's size; NaN wins over any number.
            low, high = (bound.item() for bound in torch.aminmax(tensor))
            if not (math.isfinite(low) and math.isfinite(high)):
                raise NonFiniteState(
                    f"tensor {name!r} is not finite (least {low}, greatest {high}): not saved; "
                    "training has diverged, restart from the checkpoint before"
                )


def write_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of their bytes: wide number types first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def stream(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, in pieces that fit a cache: the header, then the memory of
    each tensor (on the CPU) in `write_order`."""
    header: dict[str, _Header] = {}
    offset = 0
    for name in write_order(tensors):
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = _Header(dtype_name(name, tensor), tuple(tensor.shape), (offset, end))
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in write_order(tensors):
        data = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, data.nbytes, PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of the bytes of `stream`, as manifests have it: ``sha256-`` and hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in stream(tensors):
        digest.update(piece)
    return f"sha256-{digest.hexdigest()}"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes from the beginning of the file."""


def parse(data: Tensor, path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as views into ``data``, its bytes (uint8, on the CPU).

    Raises `DamagedCheckpoint`, naming ``path``, for bytes that are not such a file."""
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    places = layout(data[: 8 + length].numpy().data, data.numel(), path)
    return {
        name: data[place.begin : place.end].view(place.dtype).reshape(place.shape)
        for name, place in places.items()
    }


def read_header(file: ReadableFile, size_bytes: int) -> bytes:
    """As much of a safetensors file as `layout` needs, from a file at its beginning."""
    head = file.read(8) or b""
    return head + (file.read(min(size_bytes, int.from_bytes(head, "little"))) or b"")


def layout(head: Buffer, size_bytes: int, path: str) -> dict[str, Place]:
    """Where the tensors are in a safetensors file of this size that begins with ``head``, which holds
    its header. Raises as `parse`."""
    try:
        length = int.from_bytes(head[:8], "little")
        start = 8 + length
        if start > size_bytes:
            raise ValueError(f"a header of {length} bytes in a file of {size_bytes}")
        header = msgspec.json.decode(head[8:start], type=dict[str, _Header])
        return {name: _place(name, size_bytes, start, entry) for name, entry in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a file of tensors: {error}") from error


def _place(name: str, size_bytes: int, start: int, entry: _Header) -> Place:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"tensor {name!r} has the unknown number type {entry.dtype!r}")
    begin, end = (start + offset for offset in entry.data_offsets)
    expected = math.prod(entry.shape) * dtype.itemsize
    aligned = begin % dtype.itemsize == 0
    if not (start <= begin and end <= size_bytes and end - begin == expected and aligned):
        raise ValueError(
            f"tensor {name!r} ({entry.dtype}, shape {list(entry.shape)}) cannot be at bytes "
            f"{entry.data_offsets} of {size_bytes - start}"
        )
    return Place(dtype, entry.shape, begin, end)
