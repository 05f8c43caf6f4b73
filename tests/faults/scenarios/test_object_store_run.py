"""A training run whose checkpoints go to an object store, over real HTTP."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.store import CheckpointStore
from tests.fakes.http_proxy import http_proxy
from tests.fakes.object_stores import ObjectStore, s3_store
from tests.fakes.supervised import Status
from tests.faults.injectors.job import WAIT_S, FaultJob, by_rank, has_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A server of the S3 API, which the backend finds by the usual variables."""
    with s3_store(tmp_path) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store


@contextlib.contextmanager
def finished(directory: Path, *options: str) -> Iterator[FaultJob]:
    """A job that has trained to its end."""
    job = FaultJob(directory, *options)
    try:
        assert job.process.wait(WAIT_S) == 0, job.log_path.read_text()
        yield job
        assert job.processes_left() == []
    finally:
        job.end_all()


def test_a_run_commits_to_s3_and_goes_on_from_there(s3: ObjectStore, tmp_path: Path) -> None:
    """The second run has nothing but the URL: another machine, say."""
    url = s3.place()
    options = ("--workers", "2", "--set", f"checkpoint.url={url}")
    with finished(tmp_path / "run", *options, "--iterations", "12") as job:
        assert job.logged("checkpoint_failed") == []
    store = CheckpointStore(url, credentials_file=str(s3.credentials))
    infos = store.list()
    assert [info.iteration for info in infos] == [12, 10, 5]
    for info in infos:
        store.verify(info)

    shutil.rmtree(tmp_path / "run")
    with finished(tmp_path / "run", *options, "--iterations", "14") as job:
        restored = job.logged("checkpoint_restored")
    assert restored[0]["path"] == infos[0].path
    newest = store.list()[0]
    assert newest.iteration == 14
    assert newest.generation > infos[0].generation


def assert_sound(store: CheckpointStore) -> None:
    """Every committed checkpoint verifies, but for one that retention removes meanwhile."""
    for info in store.list():
        try:
            store.verify(info)
        except CheckpointError:
            assert info.path not in {other.path for other in store.list()}


def test_ten_kills_of_the_writers_rank_leave_only_sound_checkpoints(
    s3: ObjectStore, tmp_path: Path
) -> None:
    """In the middle of its data, between the answer and the manifest, and from outside at any moment."""
    url = s3.place()
    options = ("--workers", "2", "--set", f"checkpoint.url={url}")
    periods = ("--set", "checkpoint.every_iterations=2", "--set", "checkpoint.keep_last=4")
    store = CheckpointStore(url, credentials_file=str(s3.credentials))
    job = FaultJob(tmp_path / "run", *options, *periods)
    try:
        before = job.settle(2)
        for kill in range(10):
            point = ("checkpoint_save", "checkpoint_manifest", None)[kill % 3]
            victim = by_rank(before, 0)
            if point is None:
                job.kill(before, 0)
            else:
                job.arming.arm(f"{point}:0=kill")
                assert job.wait_fired()[0].entry == f"{point}:0=kill"
            before = job.settle(2, newer_than={victim["slot"]: victim["incarnation"]})
            assert_sound(store)
        assert job.end() == 0
    finally:
        left = job.end_all()
    assert left == []
    infos = store.list()
    assert len(infos) == 4
    for info in infos:
        store.verify(info)
    assert infos[0].iteration == max(info.iteration for info in infos)
    directories = {name.partition("/")[0] for name in s3.files(url)}
    assert directories == {info.directory for info in infos}, "leftovers are collected"


def test_a_change_of_generation_does_not_void_what_a_healthy_writer_uploads(
    s3: ObjectStore, tmp_path: Path
) -> None:
    """Rank 1 is lost while rank 0 writes; the commit ends under the generation it began in."""
    url = s3.place()
    job = FaultJob(tmp_path / "run", "--workers", "2", "--set", f"checkpoint.url={url}")
    try:
        before = job.settle(2)
        job.arming.arm("checkpoint_save:0=sleep=3")
        job.wait_fired()
        job.kill(before, 1)
        began_in = f"-generation-{before['generation']:06d}-"

        def committed_late(status: Status) -> bool:
            checkpoint = status["checkpoint"]
            ours = began_in in (checkpoint["path"] or "") and checkpoint["iteration"] > 0
            return ours and status["generation"] > before["generation"]

        job.wait_for(committed_late, "the checkpoint of the generation before")
        assert job.logged("checkpoint_failed") == []
        assert job.end() == 0
    finally:
        left = job.end_all()
    assert left == []


def test_a_store_that_goes_away_stops_nobody_and_a_restore_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options: tuple[str, ...] = ("--workers", "2", "--set", "checkpoint.every_iterations=3")
    with s3_store(tmp_path) as server, http_proxy(server.endpoint) as proxy:
        for name, value in {**server.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        options = (*options, "--set", f"checkpoint.url={server.place()}")
        job = FaultJob(tmp_path / "run", *options)
        try:
            job.settle(2)
            job.wait_for(has_checkpoint, "a checkpoint")
            proxy.decide = lambda method, path: "refuse"
            failed = job.wait_logged("checkpoint_failed")
            assert "cannot" in failed["error"]
            before = job.status()
            victim = job.kill(before, 1)[0]
            after = job.settle(2, 6, newer_than={victim["slot"]: victim["incarnation"]})
            assert job.metrics()["checkpoint_failures_total"] >= 1
            proxy.decide = lambda method, path: "pass"
            job.wait_for(lambda s: s["checkpoint"]["iteration"] > after["iteration"], "a newer one")
            proxy.decide = lambda method, path: "refuse"
        finally:
            job.end_all()
        job = FaultJob(tmp_path / "run", *options)
        try:
            job.wait_logged("checkpoint_store_unreachable")
            job.wait_until(
                lambda: [
                    line
                    for line in job.logged("collective_broken")
                    if line["error"].startswith("cannot restore yet: cannot list s3://")
                ],
                lambda: "a restore that waits",
            )
            proxy.decide = lambda method, path: "pass"
            restored = job.wait_logged("checkpoint_restored")
            assert restored["iteration"] > after["iteration"]
            job.settle(2)
            assert job.end() == 0
        finally:
            left = job.end_all()
        assert left == []


def test_a_restored_state_that_cannot_be_committed_is_tried_again_in_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is read, and refuses to be written: nothing is trained, and no generation comes and goes."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with s3_store(tmp_path) as server, http_proxy(server.endpoint) as proxy:
        for name, value in {**server.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        job = FaultJob(
            tmp_path / "run",
            *("--workers", "2", "--set", "node.stop_grace_s=5.0"),
            *("--set", f"checkpoint.url={server.place()}"),
        )

        def lose_all() -> tuple[int, Status]:
            before = job.wait_for(has_checkpoint, "a checkpoint")
            failed = len(job.logged("checkpoint_failed"))
            proxy.decide = lambda method, path: "refuse" if method == "PUT" else "pass"
            job.kill(before, 0, 1)
            job.wait_until(
                lambda: len(job.logged("checkpoint_failed")) >= failed + 4, lambda: "four attempts"
            )
            return before["generation"], job.status()

        try:
            job.settle(2)
            generation, waits = lose_all()
            assert waits["iteration"] <= waits["checkpoint"]["iteration"], "nothing is trained"
            assert waits["generation"] <= generation + 3, "they would meet the same refusal"
            proxy.decide = lambda method, path: "pass"
            after = job.settle(2)
            assert after["generation"] == waits["generation"]
            lose_all()
            assert job.end() == 0, "it can be stopped meanwhile"
        finally:
            left = job.end_all()
        assert left == []
