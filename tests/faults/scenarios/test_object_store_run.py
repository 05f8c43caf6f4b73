"""A training run whose checkpoints go to an object store, over real HTTP."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from tests.fakes.object_stores import ObjectStore, s3_store
from tests.faults.injectors.job import WAIT_S, FaultJob

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
