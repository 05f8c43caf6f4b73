"""The registry of collectives: one table, the same in ARCHITECTURE.md."""

import re
from pathlib import Path

from rallypoint.daemon.shared.collectives import MOVES, NAMES, ORDERED, TABLE, WHEN, Sizes, of_job
from rallypoint.daemon.shared.config import Config, EnvSection, PpoSection
from tests.project import source

SIZES = Sizes(
    parameters_bytes=4000,
    state_bytes=9000,
    record_values=10,
    header_bytes=72,
    mini_batches=6,
    rank_blocks=5,
    job_blocks=9,
    block_rows_bytes=100,
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
    for entry in (*TABLE, *ORDERED, *MOVES):
        assert not entry.size.isdecimal() or int(entry.size) == entry.size_bytes(SIZES)


def test_a_mini_batch_has_one_small_reduce_beside_its_gradients() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert [e.name for e in TABLE if e.when == "mini_batch"] == ["mini_batch", "gradients"]
    calls = {entry.name: entry.calls(SIZES) for entry in TABLE}
    assert calls["mini_batch"] == calls["gradients"] == 6
    assert [name for name, n in calls.items() if n == 1] == ["advantage_moments", "last", "barrier"]


def test_a_gather_brings_what_every_rank_puts_in() -> None:
    results = {entry.name: entry.result_bytes(SIZES, 3) for entry in TABLE}
    assert (results["hash_compare"], results["mini_batch"]) == (24, 24)


def test_a_job_runs_what_its_options_ask_for() -> None:
    assert of_job(Config()) == TABLE
    alone = of_job(Config(ppo=PpoSection(advantage_scope="per_rank")))
    assert {e.name for e in TABLE} - {e.name for e in alone} == {"advantage_moments"}
    ordered = of_job(Config(ppo=PpoSection(reduction="ordered")))
    names = [entry.name for entry in ordered]
    at = names.index("advantage_moments")
    assert names[at - 2 : at] == ["block_count", "blocks"]
    assert "gradients" not in names
    bytes_of = {entry.name: entry.size_bytes(SIZES) for entry in ordered}
    assert (bytes_of["blocks"], bytes_of["block_gradients"]) == (40, 5 * 4000)
    assert (bytes_of["advantage_moments"], bytes_of["mini_batch"]) == (5 * 24, 5 * 24)
    assert bytes_of["last"] == 72 + 8 * 5 * 10
    assert [e.name for e in ordered if e.when == "mini_batch"] == ["mini_batch", "block_gradients"]
    assert {e.operation for e in ordered if e.when == "mini_batch"} == {"all-gather"}
    for entry in ordered:
        assert not entry.size.isdecimal() or int(entry.size) == bytes_of[entry.name]


def test_a_job_with_a_backup_may_move_rows() -> None:
    backed = of_job(Config(env=EnvSection(budget="global", backup="node")))
    assert [e.name for e in backed if e not in TABLE] == ["rows_wanted", "rows_bytes", "rows"]
    assert [e.when for e in backed[:6]] == ["forming"] * 6
    sizes = {entry.name: entry.size_bytes(SIZES) for entry in backed}
    assert (sizes["rows_wanted"], sizes["rows"]) == (18, 900)
    assert set(NAMES) == {entry.name for entry in (*TABLE, *ORDERED, *MOVES)}
