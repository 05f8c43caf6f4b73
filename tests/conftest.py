"""Shared by all tests: fixed seeds, a clean environment, and no process left behind."""

import os
import random
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Before numpy or torch is imported: one thread each, for the same sums on every machine.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["MPLBACKEND"] = "Agg"
# gcsfs asks a service that no emulator has, and waits a minute for it.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
for _name in [name for name in os.environ if name.startswith("RALLYPOINT_")]:
    del os.environ[_name]  # a developer's own settings do not reach the tests

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

EXIT_GRACE_S = 2.0
"""How long a process that a test has ended may take to be gone."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same global random state."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process.

    pytest names the running test in the environment, and children inherit it, also those that
    their parent left. What a fixture of wider scope started is there before this one, and is let be.
    """
    mark = f"PYTEST_CURRENT_TEST={request.node.nodeid} (".encode()
    before = _processes_with(mark)
    yield
    left = [_end(pid) for pid in _processes_with(mark) - before if not _gone(pid)]
    if left:
        pytest.fail(f"left {len(left)} process(es) behind: {'; '.join(left)}")


def _processes_with(mark: bytes) -> set[int]:
    """Other processes whose environment has an entry that starts with ``mark``."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:  # gone meanwhile, or somebody else's
                continue
            if any(item.startswith(mark) for item in environment.split(b"\0")):
                found.add(int(entry.name))
    return found


def _gone(pid: int) -> bool:
    """Wait for an exit that is under way. The tracker of multiprocessing lives as long as we do."""
    if b"multiprocessing.resource_tracker" in _command(pid):
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], EXIT_GRACE_S)[0])
    finally:
        os.close(fd)


def _end(pid: int) -> str:
    command = _command(pid).replace(b"\0", b" ").decode(errors="replace").strip()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return f"{pid} (gone since)"
    return f"{pid} {command}"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone
        return b""
