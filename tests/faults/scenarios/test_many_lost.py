"""More than one worker at once, all of them, and newcomers that never get as far as entering."""

import json
from typing import Any

import pytest

from tests.fakes.supervised import Status
from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import (
    Victim,
    assert_fired,
    assert_killed,
    assert_sound,
    kill,
    next_life,
    recover,
)
from tests.faults.injectors.job import FaultJob, by_rank, has_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.faults]

THREE = ("--workers", "3")


def formed_since(job: FaultJob, before: Status) -> list[dict[str, Any]]:
    """Journal lines of the generations that formed after this status."""
    lines = map(json.loads, job.rundir.journal.read_text().splitlines())
    return [
        line
        for line in lines
        if line["event"] == "generation" and line["generation"] > before["generation"]
    ]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_two_at_once_are_one_change(jobs: Jobs, ranks: tuple[int, int]) -> None:
    with jobs.case(*THREE) as job:
        before = job.settle()
        victims = kill(job, before, *ranks)
        assert_killed(job, *victims)
        recover(job, before, victims)
        assert_sound(job, before)
        first = formed_since(job, before)[0]
        assert (first["kind"], first["world_size"]) == ("forced", 1)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)], ids=str)
def test_two_at_the_same_point(jobs: Jobs, ranks: tuple[int, int]) -> None:
    """When the first death breaks the group before the second rank is there, the ranks are those of
    the generation that follows."""
    with jobs.case(*THREE) as job:
        before = job.settle()
        job.arming.arm(*(f"last_collective:{rank}=kill" for rank in ranks))
        pids = {fired.pid for fired in job.wait_fired(2)}
        victims = [Victim.of(w) for w in before["workers"] if w["pid"] in pids]
        assert len(victims) == 2
        assert_killed(job, *victims)
        recover(job, before, victims)
        assert_sound(job, before)


def test_all_at_once_go_on_from_the_newest_checkpoint(jobs: Jobs) -> None:
    with jobs.case(*THREE) as job:
        job.settle()
        before = job.wait_for(has_checkpoint, "a checkpoint")
        victims = kill(job, before, 0, 1, 2)
        assert_killed(job, *victims)
        job.wait_for(lambda s: s["generation"] > before["generation"], "a new generation")
        recover_all(job, before, victims)
        restored = [line for line in formed_since(job, before) if line["restore"]]
        assert len(restored) == 1
        assert restored[0]["iteration"] >= before["checkpoint"]["iteration"] > 0
        assert_sound(job, before, joined=False)  # all may have come back in the one generation


def test_the_restoring_rank_dies_before_its_first_commit(jobs: Jobs) -> None:
    """No iteration commits before the restored state has a checkpoint of its new generation."""
    with jobs.case(*THREE) as job:
        job.settle()
        before = job.wait_for(has_checkpoint, "a checkpoint")
        job.arming.arm("first_commit:0=kill")
        victims = kill(job, before, 0, 1, 2)
        assert_killed(job, *victims)
        (fired,) = job.wait_fired()
        seconds = [next_life(job, victim) for victim in victims]
        (second,) = [victim for victim in seconds if victim.pid == fired.pid]
        assert_killed(job, second)
        recover_all(job, before, [v for v in victims if v.life.slot != second.life.slot] + [second])
        assert_sound(job, before)
        restored = next(line for line in formed_since(job, before) if line["restore"])
        names = [path.name for path in (job.rundir.path / "checkpoints").iterdir()]
        assert any(int(n.split("-")[3]) > restored["generation"] for n in names), "the successor's"


@pytest.mark.parametrize("point", ["warm_up", "ready"])
def test_a_newcomer_killed_while_it_warms_up(jobs: Jobs, point: str) -> None:
    """The others do not notice: no generation comes or goes because of it."""
    with jobs.case(*THREE) as job:
        before = job.settle()
        slot = by_rank(before, 2)["slot"]
        job.arming.arm(f"{point}:{slot}=kill")  # nobody has a rank yet: the slot
        (first,) = kill(job, before, 2)
        assert_killed(job, first)
        victim = next_life(job, first)
        assert_fired(job, victim)
        recover(job, before, [first, victim])
        assert_sound(job, before)
        changes = [(line["kind"], line["world_size"]) for line in formed_since(job, before)]
        assert changes == [("forced", 2), ("planned", 3)]


def recover_all(job: FaultJob, before: Status, victims: list[Victim]) -> None:
    """As `recover`, where nobody survived: iterations start again from the checkpoint."""
    after = job.settle(3, newer_than={v.life.slot: v.life.incarnation for v in victims})
    assert not {w["pid"] for w in before["workers"]} & {w["pid"] for w in after["workers"]}
    job.wait_for(lambda s: s["iteration"] > before["iteration"], "more than before the loss")
