"""Starting workers, noticing their end, and sweeping what they leave."""

import asyncio
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.processes import (
    ProcessExecutor,
    ProcessExit,
    WorkerProcess,
    end_earlier,
    read_earlier,
    worker_environment,
)
from rallypoint.daemon.shared.config import LogSection
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

KEY = WorkerKey("local", 0, 1)
pytestmark = pytest.mark.slow


class Ends:
    """Collects the ends of processes, and waits for them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[ProcessExit] = asyncio.Queue()

    async def next(self) -> ProcessExit:
        return await asyncio.wait_for(self.queue.get(), 60)


def executor(tmp_path: Path, code: str, ends: Ends) -> ProcessExecutor:
    def command(key: WorkerKey) -> Sequence[str]:
        return [sys.executable, "-c", code]

    return ProcessExecutor(
        RunDir(tmp_path),
        command,
        dict(os.environ),
        section=LogSection(),
        on_exit=ends.queue.put_nowait,
    )


def ended_within(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    readable, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    return bool(readable)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("print('bye')", "exit code 0"),
        ("raise SystemExit(9)", "exit code 9"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)
def test_the_end_says_how(tmp_path: Path, code: str, how: str) -> None:
    async def run() -> ProcessExit:
        ends = Ends()
        workers = executor(tmp_path, code, ends)
        started = workers.start(KEY)
        assert started is not None
        assert os.getsid(started.pid) == started.pid
        assert read_earlier(RunDir(tmp_path)) == [started]
        ended = await ends.next()
        assert workers.running() == []
        assert read_earlier(RunDir(tmp_path)) == []
        return ended

    ended = asyncio.run(run())
    assert ended.how == how
    assert ended.tail == (("bye",) if code.startswith("print") else ())


def test_starts_and_ends_are_told_on_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """``workers.json`` cannot be written, as on a full disk: a directory is in its place."""
    RunDir(tmp_path).workers.mkdir()

    async def run() -> ProcessExit:
        ends = Ends()
        workers = executor(tmp_path, "raise SystemExit(9)", ends)
        assert workers.start(KEY) is not None
        return await ends.next()

    assert asyncio.run(run()).how == "exit code 9"


def test_a_worker_leaves_no_process_of_its_group_behind(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"

    async def run() -> ProcessExit:
        ends = Ends()
        executor(tmp_path, code, ends).start(KEY)
        return await ends.next()

    child = int(asyncio.run(run()).tail[-1])
    assert ended_within(child, 5.0)


def test_killing_all_waits_until_they_are_gone(tmp_path: Path) -> None:
    async def run() -> list[WorkerProcess]:
        workers = executor(tmp_path, "import time; time.sleep(1000)", Ends())
        for slot in range(2):
            workers.start(WorkerKey("local", slot, 1))
        started = read_earlier(RunDir(tmp_path))
        await asyncio.wait_for(workers.end_all(), 60)
        return started

    for process in asyncio.run(run()):
        assert not proctable.lives(process.pid, process.start_ticks)


def test_earlier_workers_are_ended_but_never_a_process_that_took_their_number(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        ends = Ends()
        workers = executor(tmp_path, "import time; time.sleep(1000)", ends)
        started = workers.start(KEY)
        assert started is not None
        path = RunDir(tmp_path).workers
        as_written = path.read_bytes()
        other = as_written.replace(b'"start_ticks":', b'"start_ticks":1')
        path.write_bytes(other)
        assert end_earlier(RunDir(tmp_path)) == []
        assert proctable.lives(started.pid, started.start_ticks)
        path.write_bytes(as_written)
        assert end_earlier(RunDir(tmp_path)) == [started]
        assert (await ends.next()).how == "killed by SIGKILL"
        assert end_earlier(RunDir(tmp_path)) == []

    asyncio.run(run())


def test_a_damaged_list_of_workers_is_refused_with_a_remedy(tmp_path: Path) -> None:
    RunDir(tmp_path).workers.write_text("[{")
    with pytest.raises(ConfigError, match=r"workers\.json: damaged.*remove the file"):
        end_earlier(RunDir(tmp_path))


def test_no_other_launcher_reaches_a_worker() -> None:
    inherited = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_RANK": "0",
        "HOME": "/h",
        "MASTER_KEY": "k",
    }
    assert worker_environment(inherited, "lo") == {
        "HOME": "/h",
        "MASTER_KEY": "k",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "PYTHONUNBUFFERED": "1",
    }
    theirs = {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "ib0"}
    assert worker_environment(theirs, "lo").items() >= theirs.items()
