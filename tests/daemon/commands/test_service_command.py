"""The commands around the end of a service, with a systemctl that says what a test wants."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.processes import WorkerProcess
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

UNIT = "rallypoint@job.service"


@contextmanager
def worker_of(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that an earlier supervisor's list names as its worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    try:
        entry = proctable.read(process.pid)
        assert entry is not None
        worker = WorkerProcess(
            key=WorkerKey("n", 0, 1), pid=process.pid, start_ticks=entry.start_ticks
        )
        RunDir(directory).workers.write_bytes(msgspec.json.encode([worker]))
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it prints is in the file."""
    said = tmp_path / "jobs"
    program = tmp_path / "bin/systemctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat {said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "result", "swept"),
    [
        ("stop", "success", True),
        ("stop", "timeout", True),
        ("stop", "signal", True),
        ("restart", "success", False),
        ("start", "signal", False),
        ("", "success", True),
        ("", "signal", False),
        ("", "watchdog", False),
    ],
)
def test_workers_are_swept_after_a_stop_only(
    tmp_path: Path,
    systemctl: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    result: str,
    swept: bool,
) -> None:
    systemctl.write_text(f"7 other.service stop running\n8 {UNIT} {job} running\n" if job else "")
    monkeypatch.setenv("SERVICE_RESULT", result)
    with worker_of(tmp_path) as process:
        assert main(["service", "sweep", UNIT, "--dir", str(tmp_path)]) == 0
        assert (process.poll() is not None) == swept


def test_before_a_stop_nothing_is_done(tmp_path: Path, systemctl: Path) -> None:
    systemctl.write_text(f"8 {UNIT} stop running\n")
    assert main(["service", "stop", UNIT, "--dir", str(tmp_path)]) == 0


def test_before_a_restart_a_supervisor_that_does_not_answer_is_left_to_systemd(
    tmp_path: Path, systemctl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl.write_text(f"8 {UNIT} restart running\n")
    assert main(["service", "stop", UNIT, "--dir", str(tmp_path)]) == 0
    assert "no supervisor answers" in capsys.readouterr().err


def test_without_systemd_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["service", "sweep", UNIT, "--dir", str(tmp_path)]) == 1
    assert "systemctl list-jobs" in capsys.readouterr().err
