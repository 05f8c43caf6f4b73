"""Processes that are forked from one that has imported what a worker needs: as good as new ones, without
the seconds that the imports of each would take. One such server for each process of pytest."""

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from rallypoint.trainer import worker

IMPORTED = ("rallypoint.trainer.worker", "torch._dynamo", "safetensors.torch", "msgspec")


@functools.cache
def context() -> ForkServerContext:
    """The server runs; it belongs to no test, so it bears the mark of none."""
    mark = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        forkserver.set_forkserver_preload(list(IMPORTED))
        forkserver.ensure_running()
    finally:
        if mark is not None:
            os.environ["PYTEST_CURRENT_TEST"] = mark
    return multiprocessing.get_context("forkserver")


class ForkedWorker:
    """A worker that is not a new program, but else has what one would have: as much of Popen as tests use.

    ``script``: what to run instead of the worker's own program.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        script: str | None,
    ) -> None:
        self._process = context().Process(
            target=_become_worker, args=(tuple(arguments), dict(environment), log, script)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The same, once it has ended. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _become_worker(
    arguments: tuple[str, ...], environment: dict[str, str], log: Path, script: str | None
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    sys.argv = [script or worker.__file__, *arguments]
    if script is not None:
        runpy.run_path(script, run_name="__main__")
    code = worker.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
