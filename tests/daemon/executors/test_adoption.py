"""A supervisor is killed while workers train, and the next one takes them over: fake workers."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.processes import WorkerProcess
from tests.fakes.supervised import WAIT_S, Status, Supervised, pids, trains

pytestmark = [pytest.mark.slow]

PATIENT: dict[str, Any] = {"grace_s": 60.0}
COUNTERS = ("iterations_total", "env_steps_total", "wall_seconds_total", "membership_changes_total")

Start = Callable[..., Supervised]


@pytest.fixture(name="start")
def fresh_lives(tmp_path: Path) -> Iterator[Start]:
    """Begins one life of the supervisor after the other, always on the same directory."""
    begun: list[Supervised] = []

    def start(*options: str, worker: dict[str, Any] = PATIENT) -> Supervised:
        begun.append(Supervised(tmp_path / "run", *options, worker=worker))
        return begun[-1]

    yield start
    for run in begun:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait(WAIT_S)
    for process in begun[0].workers():
        proctable.end_session(process.pid, process.start_ticks, 5.0)


def journal(run: Supervised, event: str) -> list[dict[str, Any]]:
    return [line for line in run.journal() if line["event"] == event]


def assert_no_gap(run: Supervised) -> None:
    """Every iteration once, in order, from the first one on."""
    numbers = [line["iteration"] for line in journal(run, "iteration")]
    assert numbers == list(range(1, len(numbers) + 1))


def lives(worker: WorkerProcess) -> bool:
    return proctable.lives(worker.pid, worker.start_ticks)


def trained_on(run: Supervised, before: Status, iterations: int = 5) -> Status:
    """All train, and this many iterations more than before are committed."""
    number = before["iteration"] + iterations
    return run.wait_for(lambda s: trains(s, 2) and s["iteration"] >= number)


def test_the_next_supervisor_takes_over_and_nothing_is_lost(start: Start) -> None:
    run = start()
    before = run.wait_for_training(2)
    counted = run.metrics()
    run.end(signal.SIGKILL)
    again = start()
    after = trained_on(again, before, 10)
    assert pids(after) == pids(before)
    assert after["generation"] == before["generation"]
    assert [w["rank"] for w in after["workers"]] == [w["rank"] for w in before["workers"]]
    assert after["last_change"] == before["last_change"]
    assert after["checkpoint"]["iteration"] == before["checkpoint"]["iteration"]
    assert sum(w["num_envs"] for w in after["workers"]) == 256
    values = again.metrics()
    for name, value in counted.items():
        if name.split("{")[0] in COUNTERS:
            assert values[name] >= value, name
    assert len(again.logged("worker_adopted")) == 2
    assert len(again.logged("worker_started")) == 2, "those of the first life"
    assert again.end() == 0
    ends = {line["reason"] for line in again.logged("worker_exited")}
    assert ends == {"unknown: its parent is gone"}
    for event in ("generation", "recovery"):
        numbers = [line["generation"] for line in journal(again, event)]
        assert numbers == list(range(1, after["generation"] + 1)), "each once"
    assert_no_gap(again)


def test_counters_stay_those_of_the_journal_however_often_it_is_killed(start: Start) -> None:
    run = start()
    first = before = run.wait_for_training(2)
    for _ in range(4):
        run.end(signal.SIGKILL)
        run = start()
        before = trained_on(run, before)
    assert pids(before) == pids(first)
    values = run.metrics()
    lines = journal(run, "iteration")
    counted = lines[: int(values["iterations_total"])]
    assert counted[-1]["iteration"] == values["iterations_total"] > before["iteration"] - 1
    steps = sum(rank["env_steps"] for line in counted for rank in line["ranks"])
    assert values["env_steps_total"] == steps
    assert not [v for name, v in values.items() if name.startswith("env_steps_lost") and v]
    assert run.end() == 0
    assert_no_gap(run)
    assert not run.logged("iteration_gap")


def test_killed_again_while_it_adopts(start: Start) -> None:
    run = start()
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    for moment in ("worker_adopted", "supervisor_started"):
        run = start()
        seen = len(run.logged(moment))
        deadline_s = time.monotonic() + WAIT_S
        while len(run.logged(moment)) == seen and time.monotonic() < deadline_s:
            time.sleep(0.001)
        run.end(signal.SIGKILL)
    run = start()
    after = trained_on(run, before)
    assert pids(after) == pids(before)
    assert after["generation"] == before["generation"]
    assert run.end() == 0
    assert_no_gap(run)


def test_a_worker_that_dies_while_nobody_looks_is_noticed_as_a_loss(start: Start) -> None:
    run = start("--workers", "3")
    before = run.wait_for_training(3)
    run.end(signal.SIGKILL)
    victim = next(worker for worker in run.workers() if worker.key.slot == 1)
    os.kill(victim.pid, signal.SIGKILL)
    again = start("--workers", "3")
    after = again.wait_for(lambda s: trains(s, 3) and s["iteration"] >= before["iteration"] + 5)
    assert {slot: pid for slot, pid in pids(after).items() if slot != 1} == {
        slot: pid for slot, pid in pids(before).items() if slot != 1
    }
    assert after["workers"][1]["incarnation"] == 2
    changes = [(line["kind"], line["cause"]) for line in journal(again, "generation")]
    assert changes[-2:] == [("forced", "worker_lost"), ("planned", "join")]
    assert again.metrics()['worker_restarts_total{reason="unknown"}'] == 1
    assert again.end() == 0
    assert_no_gap(again)


@pytest.mark.parametrize(
    "worker",
    [{"hello": {"colour": "blue"}}, {"old": True}],
    ids=["a-field-that-we-do-not-know", "of-an-older-version"],
)
def test_workers_of_another_version_are_adopted(start: Start, worker: dict[str, Any]) -> None:
    run = start(worker={**PATIENT, **worker})
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    again = start()
    number = before["iteration"] + 5
    after = again.wait_for(lambda s: s["iteration"] >= number)
    assert pids(after) == pids(before)
    assert after["generation"] == before["generation"]
    assert again.end() == 0
    assert_no_gap(again)


@pytest.mark.parametrize(
    ("hello", "logged"),
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"config_hash": "other"}, "has configuration other"),
    ],
)
def test_workers_that_do_not_fit_are_ended_and_replaced(
    start: Start, hello: dict[str, Any], logged: str
) -> None:
    run = start(worker={**PATIENT, "hello": hello})
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    old = run.workers()
    again = start()
    after = again.wait_for(lambda s: trains(s, 2) and s["generation"] > before["generation"])
    assert not set(pids(after).values()) & set(pids(before).values())
    assert not [worker for worker in old if lives(worker)]
    assert logged in again.log_path.read_text()
    assert again.end() == 0


def test_one_that_says_nothing_is_ended_and_the_others_train_on(start: Start) -> None:
    run = start("--workers", "3")
    before = run.wait_for_training(3)
    run.end(signal.SIGKILL)
    silent = next(worker for worker in run.workers() if worker.key.slot == 2)
    os.kill(silent.pid, signal.SIGSTOP)
    again = start("--workers", "3")
    after = again.wait_for(lambda s: trains(s, 3) and s["workers"][2]["incarnation"] == 2)
    assert not lives(silent)
    assert [pids(after)[slot] for slot in (0, 1)] == [pids(before)[slot] for slot in (0, 1)]
    assert "said nothing within" in again.logged("worker_killed")[0]["reason"]
    assert again.end() == 0
    assert_no_gap(again)


def test_without_its_plan_earlier_workers_are_ended_before_any_is_started(start: Start) -> None:
    run = start()
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    old = run.workers()
    state = json.loads(run.rundir.state.read_text())
    run.rundir.state.write_text(json.dumps({**state, "plans": []}))
    again = start()
    after = again.wait_for(lambda s: trains(s, 2) and s["generation"] > before["generation"])
    assert not [worker for worker in old if lives(worker)]
    assert min(w["incarnation"] for w in after["workers"]) == 2
    ended = again.logged("earlier_worker_ended")
    assert {line["pid"] for line in ended} == {worker.pid for worker in old}
    started = [line["timestamp"] for line in again.logged("worker_started")][2:]
    assert max(line["timestamp"] for line in ended) <= min(started)
    assert again.end() == 0


def test_when_all_have_left_it_restores(start: Start) -> None:
    run = start(worker={"grace_s": 0.2})
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    deadline_s = time.monotonic() + WAIT_S
    while any(map(lives, run.workers())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    again = start()
    after = again.wait_for(lambda s: trains(s, 2) and s["generation"] > before["generation"])
    assert not again.logged("worker_adopted")
    formed = [x for x in journal(again, "generation") if x["generation"] > before["generation"]]
    assert formed[0]["restore"], "later ones let in who was not ready in time"
    assert min(w["incarnation"] for w in after["workers"]) == 2
    assert again.end() == 0


def test_a_stop_that_comes_first_waits_for_the_adopted(start: Start) -> None:
    run = start()
    before = run.wait_for_training(2)
    run.end(signal.SIGKILL)
    again = start()
    seen = len(again.logged("supervisor_started"))
    deadline_s = time.monotonic() + WAIT_S
    while len(again.logged("supervisor_started")) == seen and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert again.end() == 0
    assert not again.logged("worker_killed")
    assert [line["reason"] for line in again.logged("worker_leaving")] == ["stopped"] * 2
    assert journal(again, "iteration")[-1]["iteration"] >= before["iteration"]
    assert_no_gap(again)
