"""The registry of collectives: one table, the same in ARCHITECTURE.md."""

import re
from pathlib import Path

from rallypoint.daemon.shared.collectives import NAMES, TABLE, WHEN, Sizes
from tests.project import source

SIZES = Sizes(
    parameters_bytes=4000, state_bytes=9000, record_values=10, header_bytes=72, mini_batches=6
)


def test_the_table_of_architecture_is_the_registry() -> None:
    section = (
        source(Path("ARCHITECTURE.md")).partition("### An iteration")[2].partition("\n### ")[0]
    )
    rows = re.findall(r"^\| (`\w+`.*) \|$", section, re.MULTILINE)
    written = [tuple(cell.strip() for cell in row.split(" | ")) for row in rows]
    assert written == [
        (f"`{e.name}`", WHEN[e.when], e.operation, e.dtype, e.size, e.meaning) for e in TABLE
    ]


def test_sizes_in_words_are_sizes_in_bytes() -> None:
    bytes_of = {entry.name: entry.size_bytes(SIZES) for entry in TABLE}
    assert bytes_of["last"] == 72 + 8 * 10
    assert (bytes_of["broadcast"], bytes_of["gradients"]) == (9000, 4000)
    for entry in TABLE:
        assert not entry.size.isdecimal() or int(entry.size) == bytes_of[entry.name]


def test_a_mini_batch_has_one_small_reduce_beside_its_gradients() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert [e.name for e in TABLE if e.when == "mini_batch"] == ["mini_batch", "gradients"]
    calls = {entry.name: entry.calls(SIZES) for entry in TABLE}
    assert calls["mini_batch"] == calls["gradients"] == 6
    assert [name for name, n in calls.items() if n == 1] == ["advantage_moments", "last", "barrier"]


def test_a_gather_brings_what_every_rank_puts_in() -> None:
    results = {entry.name: entry.result_bytes(SIZES, 3) for entry in TABLE}
    assert (results["hash_compare"], results["mini_batch"]) == (24, 24)
