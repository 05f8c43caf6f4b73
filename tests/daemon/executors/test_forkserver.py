"""Workers from the fork server: the same ends, the same files, another parent."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.processes import (
    ProcessExecutor,
    ProcessExit,
    WorkerProcess,
    read_earlier,
    worker_environment,
)
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.config import Config, EnvSection, LogSection, MembershipSection
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage

pytestmark = pytest.mark.slow

WAIT_S = 60.0


class Workers:
    """An executor with a fork server, and what it says."""

    def __init__(self, directory: Path) -> None:
        self.rundir = RunDir(directory)
        config = Config(
            env=EnvSection(task="pointmass"), membership=MembershipSection(orphan_grace_s=WAIT_S)
        )
        self.rundir.config.write_bytes(configload.to_json(config))
        self.started: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self.ended: asyncio.Queue[ProcessExit] = asyncio.Queue()
        self.more: tuple[str, ...] = ()
        self.executor = ProcessExecutor(
            self.rundir,
            self._command,
            worker_environment(os.environ, "lo"),
            section=LogSection(),
            on_exit=self.ended.put_nowait,
            on_forked=self.started.put_nowait,
        )
        self.executor.use_fork_server()

    def _command(self, key: WorkerKey) -> Sequence[str]:
        place = ("--dir", str(self.rundir.path), "--node", key.node, "--slot", str(key.slot))
        life = ("--incarnation", str(key.incarnation), *self.more)
        return [sys.executable, "-m", "rallypoint.trainer.worker", *place, *life]

    async def start(self, slot: int, *more: str) -> WorkerProcess:
        self.more = more
        key = WorkerKey("local", slot, 1)
        SlotPage(self.rundir.page(slot), create=True).close()
        process = self.executor.start(key)
        if process is None:
            process = await asyncio.wait_for(self.started.get(), WAIT_S)
        assert process.key == key
        assert process in read_earlier(self.rundir)
        return process

    async def end(self) -> ProcessExit:
        return await asyncio.wait_for(self.ended.get(), WAIT_S)

    def server_pid(self) -> int:
        forks = self.executor._forks
        assert forks is not None
        assert forks.pid is not None
        return forks.pid


def run(tmp_path: Path, use: Callable[[Workers], object]) -> None:
    async def whole() -> None:
        workers = Workers(tmp_path)
        try:
            await use(workers)  # type: ignore[misc]
        finally:
            await asyncio.wait_for(workers.executor.end_all(), WAIT_S)
        assert read_earlier(workers.rundir) == []

    asyncio.run(whole())


def appends_to(path: Path, pid: int) -> bool:
    """Whether the process prints into this file, wherever that ends by then."""
    process = Path(f"/proc/{pid}")
    _, octal = (process / "fdinfo/2").read_text().splitlines()[1].split()
    return (process / "fd/2").samefile(path) and bool(int(octal, 8) & os.O_APPEND)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until_it_leads_its_session(process: WorkerProcess) -> None:
    for _ in range(1000):
        entry = proctable.read(process.pid)
        if entry is not None and entry.session == process.pid:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{process} leads no session")


def test_what_the_server_and_the_feed_print_is_bounded(tmp_path: Path) -> None:
    bound = LogSection().worker_file_bytes

    async def use(workers: Workers) -> None:
        await workers.start(0)
        paths = (workers.rundir.fork_server_log, workers.rundir.wandb_log)
        workers.rundir.wandb.mkdir()
        for path in paths:
            with path.open("ab") as file:
                file.write(b"old\n" + bytes(bound) + b"new\n")
        bounding = asyncio.create_task(workers.executor.bound_logs())
        try:
            async with asyncio.timeout(WAIT_S):
                while any(path.stat().st_size for path in paths):  # noqa: ASYNC110 - files
                    await asyncio.sleep(0.01)
        finally:
            bounding.cancel()
        for path in paths:
            kept = path.with_name(f"{path.name}.1").read_bytes()
            assert len(kept) == bound
            assert kept.endswith(b"new\n")
        assert appends_to(paths[0], workers.server_pid()), "else it would go on behind a hole"

    run(tmp_path, use)


def test_ends_are_told_and_the_server_is_replaced(tmp_path: Path) -> None:
    async def use(workers: Workers) -> None:
        await workers.start(0, "--no-such-option")
        ended = await workers.end()
        assert ended.how == "exit code 2"
        assert "unrecognized arguments: --no-such-option" in ended.tail[-1]
        lives = await workers.start(0)
        await until_it_leads_its_session(lives)
        entry = proctable.read(lives.pid)
        assert entry is not None
        assert entry.start_ticks == lives.start_ticks
        parent = workers.server_pid()
        assert parent_of(lives.pid) == parent
        assert len(os.listdir(f"/proc/{parent}/task")) == 1
        os.kill(lives.pid, signal.SIGKILL)
        assert (await workers.end()).how == "killed by SIGKILL"
        orphan = await workers.start(1)
        os.kill(parent, signal.SIGKILL)
        another = await workers.start(0)
        assert workers.server_pid() != parent
        assert proctable.lives(orphan.pid, orphan.start_ticks), "a worker outlives its server"
        for process in (orphan, another):
            workers.executor.kill(process.key)
        ends = {e.process.key.slot: e.how for e in (await workers.end(), await workers.end())}
        assert ends == {0: "killed by SIGKILL", 1: "unknown: its parent is gone"}
        assert workers.rundir.fork_server_log.read_text() == ""

    run(tmp_path, use)


def test_a_server_that_cannot_start_leaves_it_to_a_new_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports fail; so do the worker's, but that one is a process of its own and says so."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def use(workers: Workers) -> None:
        process = await workers.start(0)
        assert os.getpgid(process.pid) == process.pid
        ended = await workers.end()
        assert ended.how == "exit code 1"
        assert "no torch today" in ended.tail[-1]
        assert "no torch today" in workers.rundir.fork_server_log.read_text()

    run(tmp_path, use)


def test_an_end_before_it_is_warm_leaves_nothing(tmp_path: Path) -> None:
    async def use(workers: Workers) -> None:
        assert workers.executor.start(WorkerKey("local", 0, 1)) is None
        pid = workers.server_pid()
        await workers.executor.end_all()
        entry = proctable.read(pid)
        assert entry is None or entry.state == "Z"
        assert workers.started.empty()

    run(tmp_path, use)
