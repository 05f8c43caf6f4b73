"""The commands of the quickstarts do what their pages say: each page's ``bash`` blocks are one script."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injectors.job import ROOT, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(240)]

WAIT_S = 200.0
SMALL = {
    "ENV__TASK": "pointmass",
    "ENV__NUM_ENVS": "16",
    "PPO__HIDDEN": "[16, 16]",
    "PPO__ROLLOUT_STEPS": "8",
    "JOB__ITERATIONS": "1000000",
    "CHECKPOINT__EVERY_ITERATIONS": "50",
    "MEMBERSHIP__ORPHAN_GRACE_S": "60",
    "METRICS__PORT": "0",
    "LOG__FORMAT": "json",
}
"""A job that two cores can run three times over; the commands stay as they are."""


def script(page: str) -> str:
    """The commands of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no commands"
    return "set -eu\n" + "".join(blocks)


class Shell:
    """Runs scripts in a directory, and leaves no process behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = f"QUICKSTART={uuid.uuid4().hex}"

    def run(self, commands: str, **more: str) -> str:
        """What they print, and what went wrong; they must succeed."""
        name, value = self._mark.split("=")
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
            **{f"RALLYPOINT_{key}": setting for key, setting in SMALL.items()},
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT / "src"),
            name: value,
        }
        done = subprocess.Popen(
            ["/bin/bash", "-c", commands],
            cwd=self.directory,
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = done.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.close()
            output, _ = done.communicate()
            output += "\n(not over in time)"
        logs = "".join(
            f"--- {p.name}\n{p.read_text()[-3000:]}" for p in self.directory.glob("*.log")
        )
        assert done.returncode == 0, f"{output}\n{logs}"
        return output

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """Lines of a supervisor's log."""
        lines = (self.directory / name).read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def left(self) -> list[int]:
        """Processes that still run."""
        return processes_with(self._mark)

    def close(self) -> None:
        """End what is left, by its ids."""
        deadline_s = time.monotonic() + 10
        while (pids := self.left()) and time.monotonic() < deadline_s:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def test_quickstart_on_one_machine(shell: Shell) -> None:
    output = shell.run(script("quickstart.md"))
    for seen in ("worker_lost", "join"):  # of the events that it shows
        assert seen in output
    adopted = {line["pid"] for line in shell.logged("first.log", "worker_adopted")}
    started = {line["pid"] for line in shell.logged("first.log", "worker_started")}
    assert len(adopted) == 2
    assert adopted <= started, "the supervisor that was killed had started them"
    assert list((shell.directory / "runs/first/checkpoints").glob("*/manifest.json"))
    assert (shell.directory / "runs/first/curve.png").exists()
    assert shell.left() == []


def test_three_nodes_with_etcd(shell: Shell) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        port, peer_port = (str(free.getsockname()[1]) for free in (one, two))
    output = shell.run(script("three-nodes.md"), ETCD_PORT=port, ETCD_PEER_PORT=peer_port)
    # With the worker gone and the supervisor's lease still good, whichever is seen first.
    assert re.search(r"node_lost|worker_lost", output)
    assert "join" in output
    ends = {name: shell.logged(f"{name}.log", "supervisor_ended")[-1]["code"] for name in "abc"}
    assert ends == {"a": 0, "b": 0, "c": 0}
    starts = {name: len(shell.logged(f"{name}.log", "worker_started")) for name in "abc"}
    # b's log is that of its second life.
    assert starts == {"a": 1, "b": 1, "c": 1}, "survivors keep their process"
    deadline_s = time.monotonic() + 10
    while shell.left() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert shell.left() == []
