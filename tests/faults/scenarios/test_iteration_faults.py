"""SIGKILL of each rank at each point of an iteration, with three workers."""

import pytest

from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import assert_sound, lose_at, recover
from tests.faults.model.lines import GenerationLine, read_journal

pytestmark = [pytest.mark.slow, pytest.mark.faults]

POINTS = (
    *("rollout", "gae", "mini_batch", "backward_begin", "backward_end", "between_steps"),
    *("last_collective", "prepared", "committed"),
)


"""In the rollout, after it, in the forward pass, in the backward pass with its collective, in the optimiser
step, and around the last collective."""


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_numeric_28_killed_in_an_iteration(jobs: Jobs, point: str, rank: int) -> None:
    with jobs.case("--workers", "3") as job:
        before = job.settle()
        victim = lose_at(job, before, point, rank)
        recover(job, before, [victim])
        assert_sound(job, before)


@pytest.mark.parametrize("point", ["checkpoint_save", "checkpoint_manifest"])
def test_numeric_28_killed_while_it_writes_a_checkpoint(jobs: Jobs, point: str) -> None:
    with jobs.case("--workers", "3") as job:
        before = job.settle()
        victim = lose_at(job, before, point, 0)
        after = recover(job, before, [victim])
        job.wait_for(
            lambda s: (s["checkpoint"]["iteration"] or 0) > after["iteration"],
            "a checkpoint of the next rank 0",
        )
        assert_sound(job, before)


@pytest.mark.parametrize(
    ("point", "rank"),
    [("rollout", 3), ("mini_batch", 1), ("backward_end", 0), ("between_steps", 2)],
)
def test_numeric_28_one_of_four_is_killed(jobs: Jobs, point: str, rank: int) -> None:
    """Three go on, and four when it is back."""
    with jobs.case("--workers", "4") as job:
        before = job.settle(4)
        victim = lose_at(job, before, point, rank)
        recover(job, before, [victim])
        formed = [x for x in read_journal(job.rundir.journal) if isinstance(x, GenerationLine)]
        sizes = [len(x.members) for x in formed if x.generation > before["generation"]]
        assert (sizes[0], sizes[-1]) == (3, 4)
        assert_sound(job, before)
