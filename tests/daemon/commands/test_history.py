"""`rallypoint events` and the bars of `status --watch`: what a journal says about its generations."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rallypoint.daemon.cli import main
from rallypoint.daemon.commands.history import Event, notes, read_events, who
from rallypoint.daemon.commands.watch import ago, bar, phases, render
from rallypoint.daemon.executors.labels import PHASES
from rallypoint.daemon.shared.rundir import RunDir


def key(slot: int, life: int = 1) -> dict[str, Any]:
    return {"node": "n", "slot": slot, "incarnation": life}


def generation(number: int, *members: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "event": "generation",
        "generation": number,
        "kind": "forced",
        "cause": "worker_lost",
        "restore": False,
        "hold": False,
        "world_size": len(members),
        "members": [{**m, "rank": rank, "blocks": [rank]} for rank, m in enumerate(members)],
        "source": members[0],
        "iteration": 10 * number,
        "rolled_back": False,
        "unix_s": 1000.0 + number,
        **fields,
    }


def recovery(number: int, **seconds: float) -> dict[str, Any]:
    known = {**dict.fromkeys(PHASES), **seconds}
    return {"event": "recovery", "generation": number, "seconds": known, "unix_s": 1000.0}


ITERATION = {"event": "iteration", "generation": 1, "iteration": 1}
HISTORY = (
    generation(1, key(0), key(1), cause="start", restore=True, iteration=0),
    recovery(1, total=2.0),
    *(ITERATION for _ in range(50)),
    generation(3, key(0), rolled_back=True),
    recovery(3, detect=0.1, plan=0.3, group=0.2, first_step=0.4, total=1.0),
    generation(4, key(0), key(1, 2), kind="planned", cause="join", hold=True),
)


def write(path: Path, *lines: dict[str, Any], torn: str = "") -> Path:
    path.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    journal = path / "journal.jsonl"
    journal.write_text(text + torn)
    return journal


def test_each_generation_has_its_cause_who_and_how_long(tmp_path: Path) -> None:
    first, lost, joined = read_events(write(tmp_path, *HISTORY))
    assert (first.cause, first.joined, first.left) == ("start", ["n/0#1", "n/1#1"], [])
    assert (lost.generation, lost.kind, who(lost)) == (3, "forced", "-n/1#1")
    assert (lost.seconds["total"], lost.seconds["sync"], notes(lost)) == (1.0, None, "redone")
    assert (joined.cause, who(joined), notes(joined)) == ("join", "+n/1#2", "holds")
    assert joined.seconds == dict.fromkeys(PHASES), "it does not train yet"
    assert first.seconds["total"] == 2.0
    assert notes(first) == "", "a job that begins restores nothing"


def test_a_line_that_was_never_ended_is_passed_over(tmp_path: Path) -> None:
    torn = '{"event":"generation","gener'
    assert len(read_events(write(tmp_path, *HISTORY, torn=torn))) == 3


def test_the_end_of_a_long_journal_says_the_same_as_all_of_it(tmp_path: Path) -> None:
    journal = write(tmp_path, *HISTORY)
    whole = read_events(journal)
    for size in range(10, journal.stat().st_size + 100, 97):
        tail = read_events(journal, size)
        assert tail == whole[len(whole) - len(tail) :], size
    assert read_events(journal, 10**6) == whole


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *HISTORY)
    assert main(["events", "--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "forced, worker_lost" in table
    assert "-n/1#1" in table
    assert main(["events", "--dir", str(tmp_path), "--last", "2", "--json"]) == 0
    assert [e["generation"] for e in json.loads(capsys.readouterr().out)] == [3, 4]


def test_without_a_journal_it_says_what_dir_must_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", "--dir", str(tmp_path)]) == 2
    assert "--dir must be the directory of a run" in capsys.readouterr().err


def event(**seconds: float) -> Event:
    (only,) = read_only(seconds)
    return only


def read_only(seconds: dict[str, float]) -> list[Event]:
    return [
        Event(
            *(1, 0.0, "forced", "hang", 1, [], [], False, False, False, 1, "n/0#1"),
            seconds={**dict.fromkeys(PHASES), **seconds},
        )
    ]


def test_a_bar_has_the_phases_one_after_the_other() -> None:
    change = event(detect=1.0, plan=1.5, group=0.5, first_step=2.0, total=4.0)
    assert phases(change) == [
        *(("detect", 1.0), ("plan", 0.5), ("group", 0.5)),
        ("first_step", 2.0),
    ]
    drawn = bar(change, 4.0)
    assert drawn.cell_len == 40
    widths = [(span.end - span.start, span.style) for span in drawn.spans]
    assert widths == [(10, "red"), (5, "yellow"), (5, "blue"), (20, "green")]
    assert bar(change, 8.0).cell_len == 20, "half as long as the longest"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_picture_fits_the_screen_and_its_bars_keep_their_scale(
    tmp_path: Path, width: int
) -> None:
    members = (key(0, 12), key(1, 7), key(2))
    write(
        tmp_path,
        *HISTORY,
        generation(5, *members[:2], hold=True),
        recovery(5, detect=2.0, plan=3.0, group=0.5, first_step=2.5, total=6.0),
        generation(6, *members, kind="planned", cause="join"),
        recovery(6, group=1.0, first_step=2.0, total=3.0),
    )
    worker = {"node": "gpu-node-17", "slot": 3, "pid": None, "state": "rebuilding", "rank": 3}
    worker |= {"committed_iteration": 123456, "num_envs": 4096, "incarnation": 12}
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(RunDir(tmp_path), {"workers": [worker]}, [], now_unix_s=1300.0))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "…" not in drawn
    assert "4 min" in drawn
    rows = re.findall(r"^ *(\d) .* (\d+\.\d{3}) +(█+)", drawn, re.MULTILINE)
    bars = {int(number): len(blocks) for number, _, blocks in rows}
    assert bars[5] == pytest.approx(2 * bars[6], abs=1), "the second took half as long"
    assert bars[5] >= 12


def test_how_long_ago_is_said_in_one_unit() -> None:
    assert [ago(s) for s in (-1.0, 0.4, 59.0, 61.0, 7300.0, 200000.0)] == [
        *("0 s", "0 s", "59 s", "1 min", "2 h", "2 d")
    ]


def test_a_short_phase_is_seen_beside_a_long_one() -> None:
    drawn = bar(event(detect=0.001, plan=0.002, group=0.001, first_step=10.0), 10.004)
    assert [str(span.style) for span in drawn.spans] == ["red", "yellow", "blue", "green"]
    assert drawn.cell_len == 40
    assert bar(event(), 0.0).cell_len == 0
