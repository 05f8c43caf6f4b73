"""Real workers whose supervisor keeps membership on a real etcd."""

from pathlib import Path

import pytest

from tests.fakes.etcd_server import cluster
from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import assert_killed, assert_sound, kill, recover

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def test_a_worker_is_killed_and_the_leader_of_etcd_too(jobs: Jobs, tmp_path: Path) -> None:
    with (
        cluster(tmp_path / "etcd", 3) as etcd,
        jobs.case("--workers", "2", *etcd.settings) as job,
    ):
        before = job.settle(2)
        victims = kill(job, before, 0)
        assert_killed(job, *victims)
        after = recover(job, before, victims)
        assert_sound(job, before)
        etcd.kill(etcd.leader())
        later = job.settle(2, iterations=5)
        assert later["generation"] == after["generation"]
        victims = kill(job, later, 1)
        recover(job, later, victims)
        assert_sound(job, later)
        metrics = job.metrics()
        for call in ("lease_grant", "lease_keep_alive", "put", "txn", "range", "watch"):
            assert metrics[f'etcd_request_seconds_count{{call="{call}"}}'] > 0
