"""TensorBoard's event files: scalars by tag and step, written and cut without its library.

A file is a row of records: length (8 bytes), its checksum, the data, its checksum; a checksum is a
masked CRC-32C, integers are little-endian. The data is a protocol buffer ``Event``: 1 wall time
(double), 2 step, 3 file version (text), 5 summary (1 value: 1 tag, 2 float), 7 session log (1 status,
where 1 is "start": readers forget what they have from that step on). The library itself would bring
numpy and a web server into the supervisor.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEAD: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")
_LARGEST_FLOAT: Final = 3.4028234e38
_VERSION: Final = b"\x1a\x0dbrain.Event:2"
_START: Final = b"\x3a\x02\x08\x01"


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE: Final = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C of the data, rotated and shifted as event files want it."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The value, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _record(event: bytes) -> bytes:
    head = struct.pack("<Q", len(event))
    return head + _CRC.pack(masked_crc(head)) + event + _CRC.pack(masked_crc(event))


def _event(unix_s: float, step: int, rest: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", unix_s) + b"\x10" + _varint(step) + rest


def opening(unix_s: float, step: int) -> bytes:
    """The records that begin a file whose first scalars are of this step."""
    return _record(_event(unix_s, 0, _VERSION)) + _record(_event(unix_s, step, _START))


def scalars(unix_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """One record with all values of a step; those that are no finite single-precision number are left
    out."""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, name.encode()) + b"\x15" + struct.pack("<f", float(value)))
        for name, value in values.items()
        if math.isfinite(value) and abs(value) <= _LARGEST_FLOAT
    )
    return _record(_event(unix_s, step, _bytes_field(5, summary)))


@dataclass(frozen=True)
class Scalars:
    """A record with scalars, as it was found in a file."""

    end: int
    """Where it ends, in bytes."""
    step: int
    values: dict[str, float]


def read(path: Path) -> Iterator[Scalars]:
    """The whole records with scalars of a file that this module wrote, newest first. What a writer
    that was killed left of a last one is not seen; checksums are not compared."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        ends = []
        at, size = 0, len(data)
        while at + _HEAD.size <= size:
            length, _ = _HEAD.unpack_from(data, at)
            at += _HEAD.size + length + _CRC.size
            if at > size:
                break
            ends.append((at - _CRC.size - length, at))
        for begin, end in reversed(ends):
            found = _decode(data[begin : end - _CRC.size], end)
            if found is not None:
                yield found


def _decode(event: bytes, end: int) -> Scalars | None:
    step, at = _read_varint(event, 10)
    if at == len(event) or event[at] != 5 << 3 | 2:
        return None
    length, at = _read_varint(event, at + 1)
    values, stop = {}, at + length
    while at < stop:
        length, at = _read_varint(event, at + 1)
        name_length, begin = _read_varint(event, at + 1)
        name = event[begin : begin + name_length].decode()
        (values[name],) = struct.unpack_from("<f", event, begin + name_length + 1)
        at += length
    return Scalars(end, step, values)
