"""One running job is shared by the cases of a module: a case costs one restart of a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.faults.injectors")

from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.faults.injectors.job import FaultJob


class Jobs:
    """Jobs by their options. A case that fails takes its job with it; the next one gets a new one."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._running: dict[tuple[str, ...], FaultJob] = {}
        self._count = 0

    @contextmanager
    def case(self, *options: str) -> Iterator[FaultJob]:
        """A running job with these options."""
        job = self._running.get(options)
        if job is None:
            self._count += 1
            directory = self._base / f"job-{self._count}"
            directory.mkdir()
            job = self._running[options] = FaultJob(directory / "run", *options)
        try:
            yield job
        except BaseException:  # whatever it was: this job is of no use to the next case
            del self._running[options]
            job.end_all()
            raise

    def close(self) -> None:
        """Stop every job by agreement. Raises AssertionError when one does not end as it should."""
        try:
            for job in self._running.values():
                assert job.end() == 0
                assert job.processes_left() == []
        finally:
            for job in self._running.values():
                job.end_all()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs of this module's cases."""
    jobs = Jobs(tmp_path_factory.mktemp("faults"))
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One real etcd server for all jobs that only need a sound one: each has a name of its own."""
    with cluster(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers
