"""What a manifest says of the generation that committed it, against the journal."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import kill, recover
from tests.faults.injectors.job import FaultJob

pytestmark = [pytest.mark.slow, pytest.mark.faults]

OPTIONS = (
    *("--workers", "3", "--set", "checkpoint.every_iterations=1"),
    *("--set", "checkpoint.keep_last=1000"),
)
Place = tuple[int, int]
"""(generation, iteration)."""


def manifests(job: FaultJob) -> dict[Place, dict[str, Any]]:
    found = (job.rundir.path / "checkpoints").glob("*/manifest.json")
    documents = [json.loads(path.read_text()) for path in found]
    return {(d["generation"], d["iteration"]): d for d in documents}


def safe_points(job: FaultJob) -> set[Place]:
    """The last iteration of each generation that was left by a planned change."""
    lines = [x for x in job.journal() if x["event"] in ("generation", "iteration")]
    return {
        (before["generation"], before["iteration"])
        for before, after in pairwise(lines)
        if after["event"] == "generation" and after["kind"] == "planned"
    }


def test_a_checkpoint_of_a_planned_changes_safe_point_has_the_world_that_committed_it(
    jobs: Jobs,
) -> None:
    with jobs.case(*OPTIONS) as job:
        for _ in range(5):  # the writer may be busy with the iteration before
            before = job.settle()
            recover(job, before, kill(job, before, 2))
            if safe_points(job) & manifests(job).keys():
                break
        committed = manifests(job)
        assert safe_points(job) & committed.keys(), "none was taken at a safe point"
        sizes = {
            (x["generation"], x["iteration"]): x["world_size"]
            for x in job.journal()
            if x["event"] == "iteration"
        }
        both = sizes.keys() & committed.keys()
        assert {place: committed[place]["world_size"] for place in both} == {
            place: sizes[place] for place in both
        }
        assert {sizes[place] for place in both} >= {2, 3}
