"""A reader of TensorBoard's event files, written from their format alone: every checksum is compared,
and what a "start" record makes readers forget is forgotten."""

import struct
from collections.abc import Iterator
from pathlib import Path

Fields = dict[int, list[bytes | int]]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(path: Path) -> Iterator[bytes]:
    """The data of each record. Raises AssertionError for a record that is damaged or torn."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        (head_crc,) = struct.unpack("<I", data[8:12])
        event, tail = data[12 : 12 + length], data[12 + length : 16 + length]
        assert len(tail) == 4, "a torn record"
        assert (masked(data[:8]), masked(event)) == (head_crc, struct.unpack("<I", tail)[0])
        yield event
        data = data[16 + length :]


def varint(data: bytes) -> tuple[int, bytes]:
    value, shift = 0, 0
    while True:
        value |= (data[0] & 127) << shift
        more, data = data[0] & 128, data[1:]
        if not more:
            return value, data
        shift += 7


def fields(data: bytes) -> Fields:
    """A protocol buffer: values by number."""
    found: Fields = {}
    while data:
        key, data = varint(data)
        value: bytes | int
        match key & 7:
            case 0:
                value, data = varint(data)
            case 1:
                value, data = data[:8], data[8:]
            case 5:
                value, data = data[:4], data[4:]
            case _:
                size, data = varint(data)
                value, data = data[:size], data[size:]
        found.setdefault(key >> 3, []).append(value)
    return found


def text(value: bytes | int) -> bytes:
    assert isinstance(value, bytes)
    return value


def points(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, value by tag) of a directory's files, in the order in which they are read."""
    found: list[tuple[int, dict[str, float]]] = []
    for path in sorted(directory.glob("*tfevents*")):
        read = [fields(event) for event in events(path)]
        assert read[0][3] == [b"brain.Event:2"]
        for event in read[1:]:
            (step,) = event[2]
            assert isinstance(step, int)
            if 7 in event:
                found = [point for point in found if point[0] < step]
            else:
                values = {}
                for one in fields(text(event[5][0]))[1]:
                    value = fields(text(one))
                    (values[text(value[1][0]).decode()],) = struct.unpack("<f", text(value[2][0]))
                found.append((step, values))
    return found


def steps(directory: Path) -> list[int]:
    """Steps of all points, nothing forgotten by a "start" record aside."""
    return [step for step, _ in points(directory)]
