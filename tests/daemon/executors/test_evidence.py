"""What is saved of a hung worker and of its peers, from real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.daemon.executors import evidence
from rallypoint.daemon.executors.evidence import Suspect
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage
from tests.fakes.tracing import ptrace_permitted

pytestmark = [pytest.mark.slow]

PROGRAM = """
import faulthandler, signal, sys
def in_a_loop():
    print("ready", flush=True)
    while True:
        pass
if len(sys.argv) > 1:
    faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=True)
in_a_loop()
"""


@contextmanager
def process(*arguments: str) -> Iterator[int]:
    """A process that loops; it writes stacks into the file given."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE
    ) as popen:
        try:
            assert popen.stdout is not None
            popen.stdout.readline()
            yield popen.pid
        finally:
            popen.kill()


def suspect(rundir: RunDir, slot: int, pid: int) -> Suspect:
    page = SlotPage(rundir.page(slot), create=True)
    page.put(incarnation=1, generation=3)
    counters = page.read()
    page.close()
    return Suspect(WorkerKey("a", slot, 1), pid, counters)


def save(rundir: RunDir, *suspects: Suspect) -> dict[str, str]:
    """Evidence of the first, by file name."""
    workers = {s.key: s for s in suspects}
    folder = asyncio.run(evidence.save(rundir, suspects[0].key, "hang: silent", workers))
    assert folder == rundir.evidence / "slot-0-incarnation-1"
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_stacks_page_and_threads_of_the_hung_one_and_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "dump of $4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    rundir = RunDir(tmp_path / "run")
    rundir.page(0).parent.mkdir(parents=True)
    with process(str(rundir.stacks(0))) as looping, process() as peer:
        os.kill(peer, signal.SIGSTOP)
        files = save(rundir, suspect(rundir, 0, looping), suspect(rundir, 1, peer))
        assert Path(f"/proc/{peer}").exists(), "no signal that would end it"
    assert files["reason.txt"] == "a/0#1: hang: silent\n"
    assert "in in_a_loop" in files["worker-0.txt"]
    assert f"dump of {looping}" in files["worker-0.txt"]
    assert "generation=3" in files["worker-0.txt"]
    assert "a/1#1, pid" in files["worker-1.txt"]
    assert "State:\tT (stopped)" in files["worker-1.txt"]
    assert "nothing: stopped, or without the handler" in files["worker-1.txt"]


@pytest.mark.skipif(not ptrace_permitted(), reason="Yama forbids to read other processes")
def test_py_spy_reads_real_stacks_also_of_a_process_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "DUMP_TIMEOUT_S", 60.0)
    rundir = RunDir(tmp_path / "run")
    rundir.page(0).parent.mkdir(parents=True)
    with process() as hung, process() as peer:
        os.kill(hung, signal.SIGSTOP)
        files = save(rundir, suspect(rundir, 0, hung), suspect(rundir, 1, peer))
    for name in ("worker-0.txt", "worker-1.txt"):
        dump = files[name].partition("--- py-spy\n")[2]
        assert "in_a_loop (" in dump, dump


def test_without_py_spy_the_kernel_says_where_a_stopped_process_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.page(0).parent.mkdir(parents=True)
    with process() as hung:
        os.kill(hung, signal.SIGSTOP)
        without_py_spy(tmp_path, monkeypatch)
        files = save(rundir, suspect(rundir, 0, hung))
    assert "py-spy is not installed" in files["worker-0.txt"]
    (thread,) = [x for x in files["worker-0.txt"].splitlines() if x.startswith("thread ")]
    assert thread.startswith(f"thread {hung} python")
    assert ": T, wchan " in thread
    assert "phase='starting'" in files["worker-0.txt"], "the last phase, from its page"


def without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_a_worker_that_is_gone_and_a_machine_without_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    with process() as pid:
        pass
    without_py_spy(tmp_path, monkeypatch)
    files = save(rundir, suspect(rundir, 0, pid))
    assert "not there any more" in files["worker-0.txt"]
    assert "py-spy is not installed" in files["worker-0.txt"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    for number in range(evidence.KEPT + 5):
        (rundir.evidence / f"old-{number}").mkdir(parents=True)
        os.utime(rundir.evidence / f"old-{number}", (number, number))
    with process() as pid:
        pass
    save(rundir, suspect(rundir, 0, pid))
    left = {path.name for path in rundir.evidence.iterdir()}
    assert len(left) == evidence.KEPT
    assert {"slot-0-incarnation-1", f"old-{evidence.KEPT + 4}"} <= left
