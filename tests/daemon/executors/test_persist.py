"""What a supervisor still knows after its death, and what it refuses to guess."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from rallypoint.daemon.core.records import JobRecord, JobState, MemberRecord
from rallypoint.daemon.executors import persist
from rallypoint.daemon.executors.dirlock import DirectoryLock
from rallypoint.daemon.executors.persist import StateFile, open_state
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.common import COMMON, DEVICES, common
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.survey import Survey
from tests.fakes.facts import A, B, plan

VERSIONS = {"rallypoint": "0"}


def config(*assignments: str) -> Config:
    given = [configload.parse_assignment(text) for text in assignments]
    return configload.load(command_line=given).config


def opened(
    tmp_path: Path, *assignments: str, fresh: bool = False, survey: Survey | None = None
) -> StateFile:
    return open_state(RunDir(tmp_path), config(*assignments), VERSIONS, survey, fresh=fresh)


def test_each_life_counts_on_and_keeps_the_job(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.update(generation=7, slot_incarnations={0: 3})
    second = opened(tmp_path, "job.iterations=9", "node.workers=3", "log.level=debug")
    assert second.state.supervisor_incarnation == first.state.supervisor_incarnation + 1
    assert second.state.job.uid == first.state.job.uid
    assert (second.state.generation, second.state.slot_incarnations) == (7, {0: 3})
    assert not list(tmp_path.glob("*.tmp"))


def test_other_values_are_refused_with_what_differs(tmp_path: Path) -> None:
    opened(tmp_path)
    before = RunDir(tmp_path).state.read_bytes()
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, "ppo.gamma=0.9", "job.seed=2")
    assert "job.seed: 1 -> 2, ppo.gamma: 0.99 -> 0.9" in str(caught.value)
    assert "--dir" in str(caught.value)
    with pytest.raises(ConfigError, match=r"holds job 'default', not job\.name = 'other'"):
        opened(tmp_path, "job.name=other")
    assert RunDir(tmp_path).state.read_bytes() == before


def admit(
    file: StateFile,
    stored: JobRecord,
    *others: MemberRecord,
    mine: Config | None = None,
    agreed: Mapping[str, Any] = MappingProxyType({}),
) -> JobRecord:
    return persist.admit(
        file.state,
        stored,
        agreed={**file.state.agreed, **agreed},
        others=others,
        config=mine or config(),
        versions=VERSIONS,
        fresh=False,
    )


OTHER_VALUES = {
    "job.iterations": ("40", "400 -> 40"),
    "job.env_steps": ("1000", "none -> 1000"),
    "job.min_workers": ("2", "1 -> 2"),
    "job.max_workers": ("2", "none -> 2"),
    "job.spares": ("1", "0 -> 1"),
    "membership.detect_s": ("3.0", "5.0 -> 3.0"),
    "membership.hang_s": ("4.0", "none -> 4.0"),
    "membership.join_debounce_s": ("0.5", "none -> 0.5"),
    "membership.orphan_grace_s": ("20.0", "10.0 -> 20.0"),
    "checkpoint.url": ("file:///elsewhere", 'none -> "file:///elsewhere"'),
    "checkpoint.every_iterations": ("7", "50 -> 7"),
    "checkpoint.every_s": ("60.0", "none -> 60.0"),
    "checkpoint.keep_last": ("5", "3 -> 5"),
    "checkpoint.keep_every": ("100", "none -> 100"),
    "checkpoint.keep_best": ("2", "0 -> 2"),
    "checkpoint.keep_best_metric": ("kl", '"episode_return_mean" -> "kl"'),
    "checkpoint.keep_best_order": ("least", '"greatest" -> "least"'),
    "checkpoint.env_rows": ("true", "false -> true"),
    "node.devices": ("[0, 1]", 'none -> "GPUs"'),
}
GOES_WITH = {"checkpoint.env_rows": ("env.backup=node", "env.budget=global")}


@pytest.mark.parametrize("path", [*COMMON, DEVICES])
def test_rule_11_a_value_that_holds_for_the_whole_job_is_refused_where_it_differs(
    tmp_path: Path, path: str
) -> None:
    value, words = OTHER_VALUES[path]
    extra = GOES_WITH.get(path, ())
    file, other = opened(tmp_path, *extra), MemberRecord("b", 1, "10.0.0.2", ())
    stored = replace(file.state.job, values=common(config(*extra)))
    mine = config(*extra, f"{path}={value}")
    with pytest.raises(ConfigError) as caught:
        admit(file, stored, other, mine=mine)
    assert f"runs with other values ({path}: {words}; nodes: b)" in str(caught.value)
    begun_anew = admit(file, stored, mine=mine)
    assert begun_anew.values == common(mine), "nobody is left to disagree with"
    assert admit(file, stored, other, mine=config(*extra)).values == stored.values


@pytest.mark.parametrize("end", ["failed", "finished"])
def test_a_supervisor_that_starts_while_others_leave_an_ended_job_ends_with_it(
    tmp_path: Path, end: JobState
) -> None:
    file, other = opened(tmp_path), MemberRecord("b", 1, "10.0.0.2", ())
    stored = replace(file.state.job, state=end, reason="as it is", values=common(config()))
    assert admit(file, stored, other) == stored
    begun_anew = admit(file, stored)
    assert (begun_anew.state, begun_anew.reason) == ("running", ""), "nobody is left of it"


def test_values_of_one_node_alone_may_differ(tmp_path: Path) -> None:
    file, other = opened(tmp_path), MemberRecord("b", 1, "10.0.0.2", ())
    stored = replace(file.state.job, values=common(config()))
    own = ("node.name=c", "node.workers=3", "node.bind=10.0.0.3", "log.level=debug")
    assert admit(file, stored, other, mine=config(*own)).values == stored.values


def test_rule_11_a_job_of_the_store_is_joined_only_with_equal_values_uid_and_versions(
    tmp_path: Path,
) -> None:
    file = opened(tmp_path)
    mine, other = file.state.job, MemberRecord("b", 1, "10.0.0.2", ())
    theirs = replace(mine, uid="theirs")
    assert admit(file, theirs, other).uid == "theirs", "a directory that never saw a plan"
    with pytest.raises(ConfigError, match=r"job\.seed: 7 -> 1; hash other, here"):
        admit(file, replace(mine, config_hash="other"), agreed={"job.seed": 7})
    file.update(**persist.with_plan(file.state, plan(1, A)))
    with pytest.raises(ConfigError, match=r"holds another job 'default' \(uid theirs\)"):
        admit(file, theirs, other)
    newer = replace(mine, versions={"rallypoint": "1"})
    with pytest.raises(ConfigError, match=r"rallypoint 0 here, 1 in the job"):
        admit(file, newer, other)
    assert admit(file, newer).versions == VERSIONS, "nobody is left to disagree with"
    assert admit(file, mine, other).versions == mine.versions


def test_a_plan_that_another_leader_was_faster_with_is_forgotten(tmp_path: Path) -> None:
    file = opened(tmp_path)
    first, never, second = plan(1, A), plan(2, A), plan(2, B)
    file.update(**persist.with_plan(file.state, first))
    file.update(job=replace(file.state.job, formed=1))
    file.update(**persist.with_plan(file.state, never))
    assert persist.plans_to_go_on_from(file.state, alone=True) == (first, never)
    assert persist.plans_to_go_on_from(file.state, alone=False) == (first,)
    assert not persist.trains_in_newest_plan(file.state)
    file.update(**persist.with_plan(file.state, second))
    assert (file.state.plans, file.state.generation) == ((first, second), 2)


def test_fresh_refuses_a_directory_that_holds_the_job(tmp_path: Path) -> None:
    opened(tmp_path, fresh=True)
    with pytest.raises(ConfigError, match=r"--fresh: .* already holds job 'default'"):
        opened(tmp_path, fresh=True)
    RunDir(tmp_path).state.unlink()
    manifest = tmp_path / "checkpoints" / "iteration-1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"generation": 4}')
    with pytest.raises(ConfigError, match=r"manifest\.json exists"):
        opened(tmp_path, fresh=True)


def test_without_its_file_numbers_go_on_from_journal_and_manifests(tmp_path: Path) -> None:
    manifest = tmp_path / "checkpoints" / "iteration-1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"generation": 4}')
    RunDir(tmp_path).journal.write_text('{"event":"iteration","generation":11}\n{"torn')
    assert opened(tmp_path).state.generation == 11


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 1}', b"\xff\xfe", b'{"job": 3}'])
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    RunDir(tmp_path).state.write_bytes(content)
    with pytest.raises(ConfigError, match=r"state\.json: damaged .*nothing was changed"):
        opened(tmp_path)
    assert RunDir(tmp_path).state.read_bytes() == content


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).update(schema=99)
    with pytest.raises(ConfigError, match="schema 99"):
        opened(tmp_path)


def test_a_job_is_finished_only_as_far_as_it_is_asked_for(tmp_path: Path) -> None:
    job = persist.with_progress(opened(tmp_path).state.job, 400, 1000)
    assert not persist.is_finished(job, config())
    done = persist.resumed(job, VERSIONS, {})
    finished = type(done)(uid="u", config_hash="h", versions={}, iteration=400, state="finished")
    assert persist.is_finished(finished, config())
    assert not persist.is_finished(finished, config("job.iterations=500"))
    assert persist.resumed(finished, VERSIONS, {}).state == "running"


def test_one_supervisor_per_directory(tmp_path: Path) -> None:
    with DirectoryLock(RunDir(tmp_path)):
        with pytest.raises(ConfigError) as caught:
            DirectoryLock(RunDir(tmp_path))
        assert "another supervisor (pid " in str(caught.value)
        assert str(tmp_path) in str(caught.value)
    DirectoryLock(RunDir(tmp_path)).release()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        DirectoryLock(RunDir(tmp_path / "file" / "run"))


def test_what_a_url_holds_counts_like_what_lies_here(tmp_path: Path) -> None:
    held = Survey(verdict="good", holds="s3://b/x/iteration-7", generation=12)
    with pytest.raises(ConfigError, match=r"--fresh: .*s3://b/x/iteration-7 exists"):
        opened(tmp_path, fresh=True, survey=held)
    assert opened(tmp_path, survey=held).state.generation == 12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (name, "is a directory, but a file is written there; move it away")
            for name in ("books.page", "journal.jsonl", "config.json", "workers.json", "admin.sock")
        ),
        ("slots", "is no directory, but files are written in it"),
        ("logs", "is no directory, but files are written in it"),
    ],
)
def test_what_stands_in_the_way_of_a_runs_files_is_refused(
    name: str, words: str, tmp_path: Path
) -> None:
    if name in ("slots", "logs"):
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{name}: {words}"):
        DirectoryLock(RunDir(tmp_path))
    (tmp_path / name).rename(tmp_path / "away")
    DirectoryLock(RunDir(tmp_path)).release()


def test_files_of_another_users_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = RunDir(tmp_path).journal
    journal.touch()
    monkeypatch.setattr(os, "access", lambda path, mode, **_: path != journal)
    with pytest.raises(ConfigError, match=r"journal\.jsonl: cannot be written: Permission denied"):
        DirectoryLock(RunDir(tmp_path))


def test_checkpoints_of_another_job_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    one = tmp_path / "checkpoints" / "iteration-1"
    one.mkdir(parents=True)
    (one / "manifest.json").write_text('{"job": "walk", "iteration": 1}')
    (tmp_path / "checkpoints" / "damaged").mkdir()
    (tmp_path / "checkpoints" / "damaged" / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(
        ConfigError, match=rf"{one} is a checkpoint of job 'walk', not of job\.name"
    ):
        opened(tmp_path)
    assert not RunDir(tmp_path).state.exists()
    opened(tmp_path, "job.name=walk")
    (tmp_path / "other").mkdir()
    there = Survey(verdict="good", holds="s3://bucket/x/iteration-1", jobs=("crawl",))
    with pytest.raises(ConfigError, match=r"s3://bucket/x/iteration-1 is a checkpoint of job 'cr"):
        opened(tmp_path / "other", "job.name=walk", survey=there)
    opened(tmp_path, "job.name=walk", survey=there)  # it has its own, here
    opened(tmp_path / "other", "job.name=walk", survey=replace(there, jobs=("crawl", "walk")))
