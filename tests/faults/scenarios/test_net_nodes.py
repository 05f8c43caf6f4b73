"""Three nodes on three hosts: nodes that are lost whole, together and in turn, and that freeze."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.injectors.drills import Drill, drilled, frozen
from tests.faults.injectors.netns import NetNodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetNodes]:
    with drilled(tmp_path_factory.mktemp("lost")) as job:
        yield job


def test_supervisor_and_worker_are_killed_together(job: NetNodes) -> None:
    with Drill(job) as drill:
        victim = job.leader()
        drill.crash(victim)
        drill.survived(*drill.rest(victim), cause="worker_lost")
        drill.start(victim)
        drill.whole(victim)


def test_two_nodes_killed_within_50_ms_are_one_change(job: NetNodes) -> None:
    with Drill(job) as drill:
        (stays,) = drill.rest(*(victims := job.by_rank(job.leader())[:2]))
        drill.crash(*victims)
        drill.survived(stays, cause="worker_lost")
        drill.start(*victims)
        drill.whole(*victims)


def test_two_nodes_killed_one_second_apart_are_two_changes(job: NetNodes) -> None:
    with Drill(job) as drill:
        stays, first, second = job.by_rank(job.leader())
        drill.crash(first)
        time.sleep(max(0.0, drill.struck_s + 1.0 - time.monotonic()))
        drill.crash(second)
        drill.survived(stays, cause="worker_lost", plans=2)
        drill.start(first, second)
        drill.whole(first, second)


def test_two_cables_pulled_within_50_ms_are_one_change(job: NetNodes) -> None:
    with Drill(job) as drill:
        (stays,) = drill.rest(*(victims := job.by_rank(job.leader())[:2]))
        drill.cut(*victims)
        drill.survived(stays, cause="node_lost")
        job.network.heal(*victims)
        drill.whole(*victims)


def test_a_whole_node_freezes_and_thaws(job: NetNodes) -> None:
    with Drill(job) as drill:
        victim = job.follower()
        drill.strikes()
        with frozen(job, victim) as stopped:
            assert drill.pids[victim] in stopped
            assert job[victim].process.pid in stopped
            drill.survived(*drill.rest(victim), cause="node_lost")
        drill.whole(victim)
