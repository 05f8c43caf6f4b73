"""The format of event files, by a reader of the tests' own."""

import math
from pathlib import Path

import pytest

from rallypoint.daemon.executors import eventfile
from tests.fakes import tfevents


def test_checksums_are_those_of_the_format() -> None:
    # Known answers of CRC-32C: RFC 3720, appendix B.4.
    assert tfevents.crc32c(bytes(32)) == 0x8A9136AA
    assert tfevents.crc32c(b"123456789") == 0xE3069283
    for data in (b"", bytes(32), b"123456789", bytes(range(256))):
        assert eventfile.masked_crc(data) == tfevents.masked(data)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    first = {"a/b": 0.5, "none": math.nan, "endless": math.inf, "too_large": 1e39, "c": -3.0}
    path.write_bytes(
        eventfile.opening(1.5, 7)
        + eventfile.scalars(1.5, 7, first)
        + eventfile.scalars(2.5, 300, {"ä": 2.0})
    )
    expected = [(7, {"a/b": 0.5, "c": -3.0}), (300, {"ä": 2.0})]
    assert tfevents.points(tmp_path) == expected
    found = list(eventfile.read(path))
    assert [(point.step, point.values) for point in found] == expected[::-1]
    assert found[0].end == path.stat().st_size


@pytest.mark.parametrize("cut", [1, 4, 13, 30])
def test_a_torn_record_is_not_seen(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events"
    whole = eventfile.opening(1.0, 1) + eventfile.scalars(1.0, 1, {"a": 1.0})
    path.write_bytes(whole + eventfile.scalars(2.0, 2, {"a": 2.0})[:-cut])
    (point,) = eventfile.read(path)
    assert (point.step, point.end) == (1, len(whole))


def test_an_empty_file_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    assert list(eventfile.read(tmp_path / "events")) == []
