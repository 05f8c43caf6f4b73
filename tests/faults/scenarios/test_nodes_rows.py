"""Checkpoints with env rows, of a job on several nodes: they hold the rows of every node (exact mode)."""

from pathlib import Path

import pytest

from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.reading import read_checkpoint
from rallypoint.checkpointing.store import CheckpointStore
from tests.fakes.etcd_server import EtcdCluster
from tests.faults.injectors.exact import EXACT, run
from tests.faults.injectors.job import WAIT_S
from tests.faults.injectors.nodes import Node, nodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SETTINGS = (*EXACT, "env.task=pointmass", "checkpoint.env_rows=true")
EVERY = list(range(48))
FIRST, LAST = 12, 16
TWO = tuple(
    word
    for setting in (*SETTINGS, "checkpoint.every_iterations=5", "job.min_workers=2")
    for word in ("--set", setting)
)


def rows_in(node: Node) -> dict[int, list[int]]:
    """The envs whose rows each checkpoint in a node's own directory holds, by iteration."""
    url = str(node.rundir.path / "checkpoints")
    read = [read_checkpoint(open_storage(url), info) for info in CheckpointStore(url).list()]
    return {x.info.iteration: sorted(x.tensors["env_rows/env_ids"].tolist()) for x in read}


def test_rows_of_two_nodes_are_restored_on_one_and_every_episode_goes_on(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    expected = run(tmp_path / "one", 1, LAST, SETTINGS).hashes
    with nodes(tmp_path, etcd, *TWO, "--iterations", str(FIRST)) as job:
        job.start("a", "b")
        assert job.exit_codes("a", "b") == {"a": 0, "b": 0}
        keeper = next(name for name in ("a", "b") if job[name].checkpoints())
        held = rows_in(job[keeper])
        assert set(held) == {5, 10, FIRST}, "those that were due, and the last one"
        assert held == dict.fromkeys(held, EVERY), "the rows of both nodes"
        alone = ("--set", "job.min_workers=1", "--iterations", str(LAST))
        (node,) = job.start(keeper, options=alone)
        assert node.process.wait(WAIT_S) == 0
        lines = [line for line in node.journal() if line["event"] == "iteration"]
        assert [line["world_size"] for line in lines] == [2] * FIRST + [1] * (LAST - FIRST)
        assert [line["state_hash"] for line in lines] == expected
        cut = [line["iteration"] for line in lines if any(rank["cut"] for rank in line["ranks"])]
        assert cut == [1], "no episode is cut but at the start"
