"""pause, resume and scale of a job of several nodes: real supervisors, real workers, a real etcd."""

import json
from pathlib import Path

import pytest

from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.nodes import nodes, together

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NAMES = ("a", "b", "c")


def test_any_node_can_pause_resume_and_scale_the_job(tmp_path: Path, etcd: EtcdCluster) -> None:
    options = ("--set", "checkpoint.every_iterations=100000")
    with nodes(tmp_path, etcd, *options) as job:
        job.start(*NAMES)
        job.settle(*NAMES)
        pids = job.pids(*NAMES)
        asked = job[job.follower()]
        paused = json.loads(asked.command("pause", "--json"))
        assert (paused["done"], paused["state"], paused["world_size"]) == (True, "paused", 3)
        at = {name: job[name].status()["iteration"] for name in NAMES}
        assert len(set(at.values())) == 1
        assert job.newest_checkpoint() == at["a"], "a job that holds has committed its state"
        resumed = json.loads(asked.command("resume", "--json"))
        assert resumed["done"]
        job.settle(*NAMES)
        asked.command("scale", "--workers", "2")
        small = job["a"].wait_for(lambda s: together(s, 2), "two to train")
        (out,) = (w["node"] for w in small["workers"] if w["rank"] is None)
        job[out].wait_for(lambda _: job[out].mine["state"] == "ready", "the third to wait")
        asked.command("scale", "--workers", "3")
        job.settle(*NAMES)
        assert job.pids(*NAMES) == pids
        staying = next(name for name in NAMES if name != out)
        numbers = [i for i, _ in job.committed(staying)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), (
            "none is missing, none is redone"
        )
        lost = [v for k, v in job[staying].metrics().items() if "env_steps_lost_total" in k]
        assert sum(lost) == 0
        assert set(job.end(*NAMES).values()) == {0}
