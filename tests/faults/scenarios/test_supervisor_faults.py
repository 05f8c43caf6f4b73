"""The end of a supervisor: asked for by a signal, or by SIGKILL, with real workers."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.shared.configload import from_json
from tests.fakes.supervised import trains
from tests.faults.injectors.job import PACED_RUN, WAIT_S, FaultJob, has_checkpoint
from tests.faults.model.lineage import Shape, follow
from tests.faults.model.lines import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PATIENT = ("--set", "membership.orphan_grace_s=60.0")


@contextmanager
def running(directory: Path, *options: str) -> Iterator[FaultJob]:
    """``rallypoint run`` with two workers; nothing of it is left at the end of the block."""
    job = FaultJob(directory, "--workers", "2", *options, command=PACED_RUN)
    try:
        yield job
    finally:
        job.end_all()


def journal(job: FaultJob, event: str) -> list[dict[str, Any]]:
    return [line for line in job.journal() if line["event"] == event]


def manifests(job: FaultJob) -> dict[int, Path]:
    """Committed checkpoints by iteration."""
    found = (job.rundir.path / "checkpoints").glob("*/manifest.json")
    return {json.loads(path.read_text())["iteration"]: path.parent for path in found}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_stops_all_at_one_iteration_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path / "run") as job:
        status = job.settle(2)
        assert job.end(number) == 0
        assert job.processes_left() == []
        last = journal(job, "iteration")[-1]
        assert last["iteration"] >= status["iteration"]
        assert max(manifests(job)) == last["iteration"]
        assert {line["reason"] for line in job.logged("worker_leaving")} == {"stopped"}
        assert len(job.logged("worker_leaving")) == 2
        assert not job.logged("worker_killed"), "all left in time"


def test_workers_leave_when_their_supervisor_is_killed_and_a_new_one_resumes(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "run") as job:
        before = job.settle(2)
        job.wait_for(has_checkpoint, "a checkpoint")
        job.end(signal.SIGKILL)
        job.wait_until(lambda: not job.processes_left(), lambda: f"left: {job.processes_left()}")
        newest = max(manifests(job))
        with running(tmp_path / "run") as again:
            after = again.settle(2)
            assert not again.logged("earlier_worker_ended"), "they had left by themselves"
            assert_resumed(again, before, after, newest)
            assert again.end() == 0


def test_adopted_workers_train_to_the_end_that_their_new_supervisor_was_given(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "run", *PATIENT, "--iterations", "100000") as job:
        before = job.settle(2)
        job.process.kill()
        job.process.wait(WAIT_S)
        end = before["iteration"] + 60
        with running(tmp_path / "run", *PATIENT, "--iterations", str(end)) as again:
            assert again.process.wait(WAIT_S) == 0
            assert len(again.logged("worker_adopted")) == 2
            started = [line["worker"] for line in again.logged("worker_started")]
            assert sorted(started) == ["local/0#1", "local/1#1"], "none of the second supervisor"
            assert journal(again, "iteration")[-1]["iteration"] == end
            (change,) = [x for x in journal(again, "generation") if x["cause"] == "scale"]
            assert change["kind"] == "planned"
            assert again.processes_left() == []


def test_living_workers_are_adopted_and_no_iteration_is_lost(tmp_path: Path) -> None:
    with running(tmp_path / "run", *PATIENT) as job:
        before = job.settle(2)
        counted = job.metrics()
        job.end(signal.SIGKILL)
        old = job.workers()
        with running(tmp_path / "run", *PATIENT) as again:
            after = again.wait_for(
                lambda s: (s["iteration"] or 0) >= before["iteration"] + 10 and trains(s, 2)
            )
            assert [w["pid"] for w in after["workers"]] == [p.pid for p in old]
            assert after["generation"] == before["generation"]
            values = again.metrics()
            for name in ("iterations_total", "env_steps_total"):
                assert values[name] > counted[name]
            assert values["state_hash_mismatches_total"] == 0
            again.wait_for(lambda s: (s["checkpoint"]["iteration"] or 0) > before["iteration"])
            assert again.end() == 0
            assert_one_lineage(again)
            assert journal(again, "generation")[-1]["generation"] == before["generation"]


def test_a_loss_while_there_is_no_supervisor_is_a_forced_change_of_the_next(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "run", *PATIENT) as job:
        before = job.settle(2)
        job.end(signal.SIGKILL)
        survivor, victim = job.workers()
        os.kill(victim.pid, signal.SIGKILL)
        with running(tmp_path / "run", *PATIENT) as again:
            after = again.settle(2, newer_than={victim.key.slot: victim.key.incarnation})
            assert after["workers"][survivor.key.slot]["pid"] == survivor.pid
            assert after["iteration"] > before["iteration"]
            causes = [line["cause"] for line in journal(again, "generation")]
            assert causes[-2:] == ["worker_lost", "join"]
            assert again.end() == 0
            assert_one_lineage(again)


def assert_one_lineage(job: FaultJob) -> None:
    """Every iteration once and in order, with the state that its generation took over."""
    config = from_json(job.rundir.config.read_bytes())
    shape = Shape(config.env.block, config.ppo.rollout_steps, config.ppo.epochs)
    _, wrong = follow(read_journal(job.rundir.journal), shape)
    assert not wrong


@pytest.mark.parametrize("point", ["supervisor_publish", "supervisor_mark_formed"])
def test_a_supervisor_killed_in_a_change_never_reuses_its_generation(
    tmp_path: Path, point: str
) -> None:
    with running(tmp_path / "run") as job:
        before = job.settle(2)
        job.wait_for(has_checkpoint, "a checkpoint")
        job.arming.arm(f"{point}=kill")
        job.kill(before, 1)
        (fired,) = job.wait_fired()
        assert fired.pid == job.process.pid
        assert job.process.wait(WAIT_S) == -signal.SIGKILL
        job.wait_until(lambda: not job.processes_left(), lambda: f"left: {job.processes_left()}")
        published = json.loads(job.rundir.state.read_text())["generation"]
        assert published > before["generation"]
        newest = max(manifests(job))
        with running(tmp_path / "run") as again:
            after = again.settle(2)
            assert after["generation"] > published
            assert_resumed(again, before, after, newest)
            numbers = [line["generation"] for line in journal(again, "generation")]
            assert numbers == sorted(set(numbers))
            assert again.end() == 0


def assert_resumed(
    again: FaultJob, before: dict[str, Any], after: dict[str, Any], newest: int
) -> None:
    """The new supervisor's workers went on from a checkpoint, in a newer generation."""
    restored = [line for line in journal(again, "generation") if line["restore"]][-1]
    assert 0 < restored["iteration"] <= newest
    assert restored["generation"] > before["generation"]
    assert after["generation"] > before["generation"]
    lives = min(worker["incarnation"] for worker in after["workers"])
    assert lives > max(worker["incarnation"] for worker in before["workers"])
    first = next(
        x for x in journal(again, "iteration") if x["generation"] >= restored["generation"]
    )
    assert first["iteration"] == restored["iteration"] + 1
