"""Preemption notices in a job of several nodes: real supervisors, real workers, a real etcd."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.job import WAIT_S
from tests.faults.injectors.nodes import Node, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NAMES = ("a", "b", "c")


def steps_lost(node: Node) -> float:
    lines = node.metrics()
    return sum(value for name, value in lines.items() if "env_steps_lost_total" in name)


def generations(node: Node) -> list[dict[str, Any]]:
    return [line for line in node.journal() if line["event"] == "generation"]


def test_on_a_notice_the_others_lose_no_env_step_and_the_node_may_come_back(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd) as job:
        job.start(*NAMES)
        job.settle(*NAMES)
        leaving = job.by_rank("a")[0]  # rank 0: it commits first
        staying = [name for name in NAMES if name != leaving]
        pids = job.pids(*staying)
        lost = {name: steps_lost(job[name]) for name in staying}
        answer = json.loads(job[leaving].command("simulate-notice", "--in-s", "30", "--json"))
        assert (answer["exited"], answer["passed"]) == (75, True)
        assert job[leaving].process.wait(WAIT_S) == 75
        (ordered,) = job[leaving].logged("checkpoint_ordered")
        assert ordered["reason"] == "preemption notice: simulated, 30 s left"
        job.settle(*staying)
        assert job.pids(*staying) == pids
        assert {name: steps_lost(job[name]) for name in staying} == lost
        for name in staying:
            change = generations(job[name])[-1]
            assert (change["kind"], change["cause"], change["rolled_back"]) == (
                *("planned", "notice"),
                False,
            )
        numbers = [i for i, _ in job.committed(staying[0])]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), (
            "no iteration is missing or redone"
        )
        stalls = job[staying[0]].metrics()
        assert stalls['change_stall_seconds_count{cause="notice"}'] == 1
        job.start(leaving)
        job.settle(*NAMES)
        assert job.pids(*staying) == pids


def test_the_last_holder_of_state_commits_before_it_goes(tmp_path: Path, etcd: EtcdCluster) -> None:
    options = ("--set", "checkpoint.every_iterations=100000")
    with nodes(tmp_path, etcd, *options) as job:
        (node,) = job.start("a", options=("--set", 'preemption.sources=["slurm"]'))
        job.settle("a", iterations=5)
        for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM):  # as Slurm: to all of a job
            for pid in node.processes_left():
                os.kill(pid, number)
        assert node.process.wait(WAIT_S) == 75
        assert not node.logged("worker_killed")
        assert node.checkpoints()[-1] == job.last_iteration("a")
        assert node.processes_left() == []


def test_an_iteration_without_end_costs_only_itself(tmp_path: Path, etcd: EtcdCluster) -> None:
    """The state committed last is saved between two env steps, not only at the next safe point."""
    options = ("--set", "checkpoint.every_iterations=100000", "--set", "membership.hang_s=40")
    with nodes(tmp_path, etcd, *options) as job:
        (node,) = job.start("a")
        stuck = job.settle("a")["a"]["iteration"] + 15
        node.arming.arm(f"rollout@{stuck}=sleep=2,mini_batch@{stuck}=sleep=30")
        node.wait_until(node.arming.fired, lambda: "the rollout to be slow")
        answer = json.loads(node.command("simulate-notice", "--in-s", "6", "--json"))
        assert (answer["exited"], answer["passed"]) == (75, True)
        assert node.process.wait(WAIT_S) == 75
        assert [point.entry for point in node.arming.fired()][-1].startswith("mini_batch")
        assert node.checkpoints()[-1] == job.last_iteration("a") == stuck - 1
        assert node.processes_left() == []
