"""Workers that hang: found, ended, replaced; and those that are only slow: waited for."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.supervised import Status, trains
from tests.fakes.tracing import ptrace_permitted
from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import Victim, kill, recover, stopped
from tests.faults.injectors.job import WAIT_S, FaultJob, by_rank
from tests.faults.model.lines import Life
from tests.faults.validate.history import violations

pytestmark = [pytest.mark.slow, pytest.mark.faults]

HANG_S = 3.0
OPTIONS = ("--workers", "3", "--set", f"membership.hang_s={HANG_S}")
SCRIPT = Path(__file__).parents[1] / "injectors/supervise_hangs.py"
POINTS = ("rollout:1", "backward_begin:0", "last_collective:2", "committed:1")
FORMING = ("arrive:1", "who_is_where:0", "formed_before_mark:1")


@contextmanager
def hanging(directory: Path, where: str, how: str, *, hang_s: float = HANG_S) -> Iterator[FaultJob]:
    """Two workers; the one in slot 1 hangs in its first iteration from the sixth on."""
    os.environ["HANG"] = json.dumps([where, how, 1, 6])
    options = ("--workers", "2", "--set", f"membership.hang_s={hang_s}")
    job = FaultJob(directory / "run", *options, command=(str(SCRIPT),))
    del os.environ["HANG"]
    try:
        yield job
    finally:
        job.end_all()


def stop_at(job: FaultJob, status: Status, point: str) -> Victim:
    """SIGSTOP to a worker at this point of its own code."""
    job.arming.arm(f"{point}=stop")
    return stopped_by(job, status)


def stopped_by(job: FaultJob, status: Status) -> Victim:
    """The worker that an armed point has stopped."""
    (fired,) = job.wait_fired()
    return Victim.of(next(w for w in status["workers"] if w["pid"] == fired.pid))


def stop_inside(job: FaultJob, victim: Victim) -> bool:
    """SIGSTOP to a worker that waits in a collective; False, and it goes on, when it did not."""
    if not job.page(victim.life.slot).inside:
        return False
    os.kill(victim.pid, signal.SIGSTOP)
    job.wait_until(lambda: stopped(victim.pid), lambda: "the worker to stop")
    if job.page(victim.life.slot).inside:
        return True
    os.kill(victim.pid, signal.SIGCONT)
    return False


def assert_ended_as_hung(job: FaultJob, victim: Victim) -> Path:
    """Exactly this worker was ended, for a hang, by a change with that cause; its evidence."""
    name = f"local/{victim.life.slot}#{victim.life.incarnation}"
    line = job.wait_logged("worker_killed", worker=name)
    assert line["reason"].startswith("hang: silent for ")
    job.wait_logged("worker_exited", worker=name, pid=victim.pid)
    folder = f"slot-{victim.life.slot}-incarnation-{victim.life.incarnation}"
    return job.rundir.evidence / folder


def assert_dumped(text: str, frame: str) -> bool:
    """py-spy read this worker's stacks from outside, stopped or not, unless the machine was too busy."""
    dump = text.partition("--- py-spy\n")[2]
    assert frame in dump or "did not end within" in dump, dump
    return True


def assert_counted(job: FaultJob, before: dict[str, float]) -> None:
    """One more restart, and one more change, for a hang."""
    after = job.metrics()
    for name in (
        'worker_restarts_total{reason="hang"}',
        'membership_changes_total{cause="hang"}',
    ):
        assert after[name] == before[name] + 1, name


@pytest.mark.parametrize("point", POINTS)
def test_rule_09_a_stopped_worker_is_ended_and_nobody_else(jobs: Jobs, point: str) -> None:
    with jobs.case(*OPTIONS) as job:
        before, counted = job.settle(), job.metrics()
        victim = stop_at(job, before, point)
        evidence = assert_ended_as_hung(job, victim)
        recover(job, before, [victim])
        assert_counted(job, counted)
        assert violations(job.history()) == []
        texts = [path.read_text() for path in sorted(evidence.glob("worker-*.txt"))]
        assert len(texts) == 3
        hung = [text for text in texts if ", hung\n" in text]
        assert len(hung) == 1
        assert "State:\tT (stopped)" in hung[0]
        assert all("File " in text for text in texts if text not in hung), "stacks of the peers"
        if ptrace_permitted():
            assert_dumped(hung[0], "failpoints.py")
            for text in texts:
                assert text in hung or assert_dumped(text, "_wait_for_end (")


@pytest.mark.parametrize("point", FORMING)
def test_rule_09_a_worker_that_is_stopped_while_a_generation_forms(jobs: Jobs, point: str) -> None:
    with jobs.case(*OPTIONS) as job:
        before = job.settle()
        job.arming.arm(f"{point}=stop")
        (killed,) = kill(job, before, 2)
        stopped = stopped_by(job, before)
        assert_ended_as_hung(job, stopped)
        recover(job, before, [killed, stopped])
        assert violations(job.history()) == []


def test_rule_09_a_worker_stopped_from_outside_at_any_moment(jobs: Jobs) -> None:
    with jobs.case(*OPTIONS) as job:
        before, counted = job.settle(), job.metrics()
        victim = Victim.of(by_rank(before, 1))
        os.kill(victim.pid, signal.SIGSTOP)
        assert_ended_as_hung(job, victim)
        recover(job, before, [victim])
        assert_counted(job, counted)
        assert violations(job.history()) == []


def test_rule_09_one_stopped_inside_the_collective_of_the_others_costs_a_rebuild_first(
    jobs: Jobs,
) -> None:
    with jobs.case(*OPTIONS) as job:
        before, counted = job.settle(), job.metrics()
        victim = Victim.of(by_rank(before, 2))
        job.wait_until(lambda: stop_inside(job, victim), lambda: "it to be caught inside")
        assert_ended_as_hung(job, victim)
        assert job.logged("generation_stuck"), "all were inside: nobody was ended for that"
        recover(job, before, [victim])
        changes = 'membership_changes_total{cause="hang"}'
        assert job.metrics()[changes] >= counted[changes] + 1
        assert violations(job.history()) == []


@pytest.mark.parametrize("where", ["rollout", "update"])
@pytest.mark.parametrize("how", ["loop", "gil", "lock"])
def test_rule_09_a_worker_that_is_stuck_in_its_own_code_is_ended(
    tmp_path: Path, where: str, how: str
) -> None:
    with hanging(tmp_path, where, how) as job:
        started = job.wait_logged("worker_started", worker="local/1#1")
        evidence = assert_ended_as_hung(job, Victim(Life(1, 1), started["pid"]))
        after = job.settle(2, newer_than={1: 1})
        assert after["workers"][0]["incarnation"] == 1
        assert job.metrics()['worker_restarts_total{reason="hang"}'] == 1
        assert violations(job.history()) == []
        stacks = (evidence / "worker-1.txt").read_text()
        assert "in hang" in stacks, "the place where it hangs"
        assert job.end() == 0


@pytest.mark.parametrize(
    ("how", "hang_s"),
    [
        pytest.param("slow", HANG_S, id="every step"),
        pytest.param("nap", 10.0, id="one step of five seconds"),
    ],
)
def test_rule_09_a_slow_env_is_waited_for_and_seen_as_a_straggler(
    tmp_path: Path, how: str, hang_s: float
) -> None:
    with hanging(tmp_path, "rollout", how, hang_s=hang_s) as job:
        started = [job.wait_logged("worker_started", worker=f"local/{n}#1") for n in (0, 1)]
        job.wait_for(lambda _: _ratio(job) > 2.0, "the slow iteration")
        after = job.settle(2)
        assert [w["incarnation"] for w in after["workers"]] == [1, 1]
        assert [w["pid"] for w in after["workers"]] == [line["pid"] for line in started]
        assert not job.logged("worker_killed")
        assert not job.logged("generation_stuck")
        assert job.end() == 0


def test_rule_09_all_inside_of_a_collective_that_never_ends_form_anew_and_nobody_is_ended(
    tmp_path: Path,
) -> None:
    with hanging(tmp_path, "collective", "drop") as job:
        line = job.wait_logged("generation_stuck")
        assert "local/0#1" in line["reason"]
        assert "local/1#1" in line["reason"]
        before = line["generation"]
        after = job.wait_for(lambda s: trains(s, 2) and s["generation"] > before, "to form anew")
        after = job.settle(2)
        started = [job.wait_logged("worker_started", worker=f"local/{n}#1") for n in (0, 1)]
        assert [w["pid"] for w in after["workers"]] == [line["pid"] for line in started]
        assert not job.logged("worker_killed")
        assert not job.logged("worker_exited")
        assert job.metrics()['membership_changes_total{cause="hang"}'] == 1
        assert violations(job.history()) == []
        assert job.end() == 0


def test_rule_09_a_worker_that_goes_on_in_time_is_left_alone(jobs: Jobs) -> None:
    with jobs.case(*OPTIONS) as job:
        before = job.settle()
        victim = Victim.of(by_rank(before, 1))
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            job.wait_until(lambda: stopped(victim.pid), lambda: "the worker to stop")
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        after = job.settle()
        assert [w["pid"] for w in after["workers"]] == [w["pid"] for w in before["workers"]]
        assert after["generation"] == before["generation"]


def freeze_and_go_on(job: FaultJob) -> None:
    """Supervisor and workers are stopped, and continued later, the workers first."""
    before, killed = job.settle(), len(job.logged("worker_killed"))
    pids = [job.process.pid, *(w["pid"] for w in before["workers"])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_S + 1.0)  # the fault is this time itself
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    after = job.settle(len(before["workers"]))
    lives = [[(w["pid"], w["incarnation"]) for w in s["workers"]] for s in (before, after)]
    assert lives[0] == lives[1]
    assert len(job.logged("worker_killed")) == killed
    assert violations(job.history()) == []


def test_rule_09_a_node_that_was_frozen_as_a_whole_goes_on_as_it_was(jobs: Jobs) -> None:
    with jobs.case(*OPTIONS) as job:
        freeze_and_go_on(job)


def test_rule_09_so_does_one_that_was_frozen_past_its_lease(tmp_path: Path) -> None:
    job = FaultJob(tmp_path / "run", *OPTIONS, "--set", "membership.detect_s=1.0")
    try:
        freeze_and_go_on(job)
        assert job.logged("lease_lost"), "it was past it"
        assert job.end() == 0
    finally:
        job.end_all()


def test_rule_08_a_worker_that_runs_out_of_memory_has_crashed_and_proves_nothing(
    tmp_path: Path,
) -> None:
    with hanging(tmp_path, "update", "memory") as job:
        line = job.wait_logged("worker_exited", worker="local/1#1")
        assert line["reason"] == "exit code 73"
        assert line["output_tail"][-1].startswith("MemoryError")
        job.settle(2, newer_than={1: 1})
        assert not job.logged("worker_fault")
        assert job.metrics()['worker_restarts_total{reason="error"}'] == 1
        assert job.end() == 0


@pytest.mark.parametrize("how", ["raise", "raise-last"])
def test_rule_08_a_program_error_of_all_ends_the_job_with_its_one_traceback(
    tmp_path: Path, how: str
) -> None:
    """At once, or in turn over a redo, where the other rank's lost connection is collateral."""
    with hanging(tmp_path, "update", how) as job:
        assert job.process.wait(WAIT_S) == 1
        (ended,) = job.logged("supervisor_ended")
        assert ended["code"] == 1
        assert ended["reason"].startswith(
            "program error: builtins.ValueError at hanging_worker.py:"
        )
        assert ended["reason"].count("Traceback (most recent call last)") == 1
        assert "ValueError: a program error" in ended["reason"]
        faults = job.logged("worker_fault")
        assert len(faults) <= 4, "no restart storm"
        assert {line["fingerprint"].split()[0] for line in faults} == {"builtins.ValueError"}
        for line in job.logged("collective_broken"):  # unless the new plan was quicker
            assert line["meaning"].startswith("collateral")
        assert job.processes_left() == []


def _ratio(job: FaultJob) -> float:
    return job.metrics()["straggler_ratio"]
