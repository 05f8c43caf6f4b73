"""Starting a heavy simulator: one at a time per host, and never standing still unseen."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rallypoint.daemon.shared.exitcodes import EXIT_RESTART_COLD
from rallypoint.trainer.envs.simulators.launching import (
    LaunchTimeoutError,
    StartUpWatch,
    launch_lock,
    lock_path,
)

WAIT_S = 60.0
HOLDER = """
import sys
from pathlib import Path
from rallypoint.trainer.envs.simulators.launching import launch_lock
with launch_lock(Path(sys.argv[1]), owner="holder 7", timeout_s=60, on_wait=print):
    print("held", flush=True)
    sys.stdin.read()
"""
HANGING = """
import threading
from rallypoint.trainer.envs.simulators.launching import StartUpWatch
with StartUpWatch(0.2).watching() as watch:
    watch.stage("loading assets")
    threading.Event().wait()
"""


def holder(path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_second_launch_waits_for_the_first_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waited: list[str] = []
    with holder(path) as first:

        def told(owner: str) -> None:
            waited.append(owner)
            assert first.stdin is not None
            first.stdin.close()  # it is done with its launch

        with launch_lock(path, owner="second", timeout_s=WAIT_S, on_wait=told):
            assert path.read_text() == "second"
        assert first.wait(WAIT_S) == 0
    assert waited == ["holder 7"]


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait(WAIT_S)
        with launch_lock(path, owner="second", timeout_s=WAIT_S, on_wait=pytest.fail):
            assert path.read_text() == "second"


@pytest.mark.slow
def test_a_launch_that_waits_too_long_says_for_whom(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        lock = launch_lock(path, owner="second", timeout_s=0.0, on_wait=lambda owner: None)
        with pytest.raises(LaunchTimeoutError, match=r"lock.*held by holder 7.*launch_timeout_s"):
            lock.__enter__()
        assert path.read_text() == "holder 7"
        first.kill()


def test_each_user_has_a_lock_of_each_simulator() -> None:
    paths = {lock_path("isaaclab"), lock_path("mjlab")}
    assert len(paths) == 2
    assert all(str(os.getuid()) in path.name for path in paths)


def test_a_start_that_stands_still_is_told_by_its_stage() -> None:
    told: list[tuple[str, float]] = []
    seen = threading.Event()

    def stuck(stage: str, seconds: float) -> None:
        told.append((stage, seconds))
        seen.set()

    watch = StartUpWatch(0.05, stuck)
    watch.stage("importing")
    watch.stage("building the scene")  # before anybody looks: no race with a busy machine
    with watch.watching():
        assert seen.wait(WAIT_S)
    (stage, seconds) = told[0]
    assert stage == "building the scene"
    assert seconds >= 0.05


def test_a_start_that_comes_to_its_end_is_left_alone() -> None:
    said: list[str] = []
    start = StartUpWatch(WAIT_S, lambda stage, seconds: pytest.fail(stage), said.append)
    with start.watching() as watch:
        watch.stage("importing")
    assert said == ["importing", ""]
    assert "start-up-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_worker_that_stands_still_ends_with_its_stage_and_its_stacks() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == EXIT_RESTART_COLD
    assert "stood in the stage 'loading assets'" in ended.stderr
    assert "threading.py" in ended.stderr  # where it stood
