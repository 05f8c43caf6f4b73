"""SIGKILL of each rank at each point of an iteration, with three workers."""

import pytest

from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import assert_in_place, assert_sound, lose_at

pytestmark = [pytest.mark.slow, pytest.mark.faults]

POINTS = (
    *("rollout", "gae", "backward_begin", "backward_end", "between_steps"),
    *("last_collective", "prepared", "committed"),
)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_in_an_iteration(jobs: Jobs, point: str, rank: int) -> None:
    with jobs.case("--workers", "3") as job:
        before = job.settle()
        lose_at(job, before, point, rank)
        after = job.settle(after=before["generation"] + 1)
        assert_in_place(job, before, after, lost=[rank])
        assert_sound(job)
