"""Processes of a benchmark: ended with it, whenever its own end is asked for."""

import signal
import sys
from pathlib import Path

import pytest

from tests.project import run

ASKED_WHILE_IT_FORKS = """
import os, signal, sys
from pathlib import Path
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.command import ends_in_order

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
with ends_in_order():
    processes.start(["sleep", "60"], Path(sys.argv[1]))
print("went on")
"""


@pytest.mark.slow
def test_an_end_that_is_asked_for_during_a_fork_is_not_lost(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", ASKED_WHILE_IT_FORKS, str(tmp_path / "log"))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == ""
