"""A run with two tiers of checkpoints: whatever is lost, it goes on from the newest that is left."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from tests.fakes.http_proxy import HttpProxy, http_proxy
from tests.fakes.object_stores import ObjectStore, s3_store
from tests.faults.injectors.job import FaultJob

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

PERIODS = (
    *("--workers", "2", "--set", "checkpoint.every_iterations=10"),
    *("--set", "checkpoint.local_every_iterations=2"),
)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[ObjectStore]:
    """A server of the S3 API."""
    with s3_store(tmp_path) as store:
        yield store


@pytest.fixture
def proxy(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """What lies between it and the run, which finds it by the usual variables."""
    with http_proxy(s3.endpoint) as proxy:
        variables = {**s3.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in {**variables, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def away(proxy: HttpProxy) -> None:
    proxy.decide = lambda method, path: "refuse"


def back(proxy: HttpProxy) -> None:
    proxy.decide = lambda method, path: "pass"


def wait_restored(job: FaultJob, before: int = 0) -> dict[str, Any]:
    """The restore that follows this many earlier ones, which have the same log."""
    found = job.wait_until(
        lambda: job.logged("checkpoint_restored")[before:], lambda: "a checkpoint to be restored"
    )
    return found[0]


def test_the_newest_of_both_tiers_survives_whatever_is_lost(
    s3: ObjectStore, proxy: HttpProxy, tmp_path: Path
) -> None:
    url = s3.place()
    remote = CheckpointStore(url, credentials_file=str(s3.credentials))
    local = CheckpointStore(str(tmp_path / "run" / "checkpoints"))
    options = (*PERIODS, "--set", f"checkpoint.url={url}")

    # The writer's rank dies while the URL is away; then everything does.
    job = FaultJob(tmp_path / "run", *options)
    try:
        for tier in ("url", "local"):
            job.wait_logged("checkpoint_committed", tier=tier)
        away(proxy)
        victim = job.kill(job.settle(2), 0)[0]
        job.wait_logged("checkpoint_failed", tier="url")
        job.settle(2, 6, newer_than={victim["slot"]: victim["incarnation"]})
        values = job.metrics()
        assert values['checkpoint_tier_failures_total{tier="url"}'] >= 1
        assert values['checkpoint_tier_failures_total{tier="local"}'] == 0
        assert values['checkpoint_tier_age_seconds{tier="url"}'] >= 0
    finally:
        job.end_all()
    newest = local.list()[0]
    assert newest.order > remote.list()[0].order
    assert proxy.fired

    # The URL is still away: the disk has the newest. It is taken, and committed where all can see it.
    job = FaultJob(tmp_path / "run", *options)
    try:
        restored = wait_restored(job)
        assert restored["path"] == newest.path
        back(proxy)
        job.settle(2)
        assert remote.list()[0].generation > newest.generation
        # A stop while it is away: the last state goes to the disk.
        away(proxy)
        assert job.end() == 0
        last = max(line["iteration"] for line in job.journal() if line["event"] == "iteration")
        assert local.list()[0].iteration == last
    finally:
        left = job.end_all()
    assert left == []
    local.verify(local.list()[0])

    # The disk is lost: another machine has nothing but the URL.
    shutil.rmtree(tmp_path / "run")
    back(proxy)
    expected, before = remote.list()[0], len(job.logged("checkpoint_restored"))
    job = FaultJob(tmp_path / "run", *options)
    try:
        assert wait_restored(job, before)["path"] == expected.path
        job.settle(2)
        assert job.end() == 0
    finally:
        left = job.end_all()
    assert left == []
    assert remote.list()[0].order > expected.order


def test_a_tier_that_takes_longer_than_its_period_is_counted(tmp_path: Path) -> None:
    """One write is slow: those that are due meanwhile are passed over, and the next commit tells it."""
    counted = 'checkpoint_passed_over_total{{tier="{}"}}'.format
    job = FaultJob(tmp_path / "run", "--workers", "2", "--set", "checkpoint.every_iterations=2")
    try:
        job.settle(2)
        before = job.metrics()[counted("local")]
        job.arming.arm("checkpoint_save:0=sleep=3")
        job.wait_fired()
        job.wait_until(
            lambda: job.metrics()[counted("local")] > before, lambda: "a save to be passed over"
        )
        told = [line for line in job.logged("checkpoint_committed") if line["passed_over"]]
        assert told[-1]["tier"] == "local"
        assert told[-1]["persist_s"] >= 3
        assert job.metrics()[counted("url")] == 0
        assert job.logged("checkpoint_failed") == []
        assert job.end() == 0
    finally:
        left = job.end_all()
    assert left == []
