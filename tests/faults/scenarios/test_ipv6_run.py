"""A job whose every address is an IPv6 one: stores, probes, metrics, etcd."""

from pathlib import Path

import pytest

from tests.fakes.etcd_server import cluster
from tests.faults.conftest import Jobs
from tests.faults.injectors.cases import assert_sound, kill, recover

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ADDRESSES = ("node.bind=::1", "node.advertise=::1", "node.interface=lo", "metrics.bind=::1")


def test_a_worker_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    options = tuple(part for one in ADDRESSES for part in ("--set", one))
    with (
        cluster(tmp_path / "etcd", host="[::1]") as etcd,
        jobs.case("--workers", "2", *options, *etcd.settings) as job,
    ):
        before = job.settle(2)
        assert before["metrics_url"].startswith("http://[::1]:")
        assert job.metrics()
        ready = job.logged("worker_ready")
        assert all(line["store"].startswith("::1:") for line in ready)
        assert not any(line["store"].endswith(":0") for line in ready), "the port is not published"
        recover(job, before, kill(job, before, 0))
        assert_sound(job, before)
