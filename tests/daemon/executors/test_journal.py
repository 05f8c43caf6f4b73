"""The journal: every committed iteration once, and what supersedes it."""

import json
from pathlib import Path
from typing import Any

from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import RECORDED
from tests.fakes.facts import A, B, committed, formed, plan

CONFIG = Config()
BOTH = {A: 60, B: 40}


def lines(journal: Journal) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.path.read_text().splitlines()]


def test_the_first_report_is_written_and_the_others_must_agree(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.generation(plan(1, A, B, restore=True), formed(A, 1), CONFIG)
    assert journal.commit(committed(A, 1, BOTH)) == "new"
    assert journal.commit(committed(B, 1, BOTH)) == "duplicate"
    assert journal.commit(committed(B, 2, BOTH)) == "new"
    assert journal.commit(committed(A, 2, BOTH, state_hash="other")) == "conflict"
    assert journal.commit(committed(A, 4, BOTH)) == "gap"
    written = lines(journal)
    journal.close()
    assert [line["event"] for line in written] == ["generation", *["iteration"] * 3]
    assert [line.get("iteration") for line in written] == [0, 1, 2, 4]
    first = written[1]
    assert first["source"] == {"node": "local", "slot": 0, "incarnation": 1}
    assert [(r["slot"], r["blocks"], r["env_steps"]) for r in first["ranks"]] == [
        (0, [0], 60),
        (1, [1], 40),
    ]
    assert {k: first[k] for k in ("generation", "world_size", "how", "env_steps_total")} == {
        "generation": 1,
        "world_size": 2,
        "how": "barrier",
        "env_steps_total": 100,
    }
    assert first["metrics"] == {"reward_mean": 0.1}
    assert written[0]["config"].keys() == {*RECORDED}, "enough to train it again"


def test_a_restore_winds_back_and_older_lineages_are_stale(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.generation(plan(1, A, restore=True), formed(A, 1), CONFIG)
    for iteration in (1, 2, 3):
        journal.commit(committed(A, iteration, {A: 60}))
    assert journal.generation(plan(2, B, restore=True), formed(B, 2, 1), CONFIG)
    assert journal.iteration == 1
    again = committed(B, 2, {B: 60}, generation=2, state_hash="another lineage")
    assert journal.commit(again) == "new"
    assert journal.commit(committed(A, 3, {A: 60}, generation=1)) == "stale"
    assert [line.get("iteration") for line in lines(journal)] == [0, 1, 2, 3, 1, 2]
    journal.close()


def test_a_generation_that_loses_a_committed_iteration_is_noticed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.generation(plan(1, A, B, restore=True), formed(A, 1), CONFIG)
    journal.commit(committed(A, 1, BOTH))
    assert not journal.generation(plan(2, B), formed(B, 2, 0), CONFIG)
    assert journal.generation(plan(3, B), formed(B, 3, 1), CONFIG)
    journal.close()


def test_a_line_that_a_killed_supervisor_did_not_end_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event":"generation"}\n{"event":"itera')
    journal = Journal(path)
    journal.commit(committed(A, 1, {A: 60}))
    journal.close()
    text = path.read_text().splitlines()
    assert text[1] == '{"event":"itera'
    assert json.loads(text[2])["iteration"] == 1


def test_the_next_supervisor_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.generation(plan(1, A, B, restore=True), formed(A, 1), CONFIG)
    first.commit(committed(A, 1, BOTH))
    counted_bytes = first.size_bytes
    first.commit(committed(A, 2, BOTH))
    second = Journal(path)
    later = second.resume(1, counted_bytes)
    assert [(x.event, x.iteration) for x in later] == [("iteration", 2)]
    assert [share.record().key for share in later[0].ranks] == [A, B]
    assert (second.iteration, second.knows(1), second.knows(2)) == (2, True, False)
    assert second.generation(plan(1, A, B, restore=True), formed(A, 1), CONFIG), "not written again"
    assert second.commit(committed(B, 2, BOTH)) == "duplicate"
    assert second.commit(committed(B, 1, BOTH, state_hash="other")) == "conflict"
    assert second.commit(committed(B, 3, BOTH)) == "new"
    assert [line.get("iteration") for line in lines(second)] == [0, 1, 2, 3]
    assert lines(second)[-1]["source"] == lines(second)[1]["source"]
    first.close()
    second.close()


def test_a_lineage_that_was_superseded_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.generation(plan(1, A, restore=True), formed(A, 1), CONFIG)
    for iteration in (1, 2, 3):
        first.commit(committed(A, iteration, {A: 60}))
    first.generation(plan(2, B, restore=True), formed(B, 2, 1), CONFIG)
    first.close()
    second = Journal(path)
    assert second.resume(2, second.size_bytes) == []
    assert second.iteration == 1
    again = committed(B, 2, {B: 60}, generation=2, state_hash="another lineage")
    assert second.commit(again) == "new"
    assert second.commit(committed(A, 3, {A: 60}, generation=1)) == "stale"
    second.close()
