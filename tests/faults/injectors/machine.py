"""Machines with a systemd of their own: the host's files under an overlay, started by systemd-nspawn.

Nothing is downloaded, everything that is installed here is there, and what a machine writes goes into a
tmpfs that its end takes away. Needs root and systemd-container. Cgroup controllers are read-only inside:
limits of memory and tasks do nothing here.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
BOOT_S = 60.0
COMMAND_S = 60.0
_HYBRID = [Path("/sys/fs/cgroup", name) for name in ("systemd", "unified")]
_CGROUPS = [path for path in _HYBRID if path.is_dir()] or [Path("/sys/fs/cgroup")]
"""The hierarchies in which a systemd keeps its units."""
LIFE_S = 1800
"""A machine ends by itself after this, whatever becomes of the test."""


def require() -> None:
    """Skip the test where no machine can be started."""
    if os.geteuid() != 0:
        pytest.skip("machines with a systemd of their own need root")
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("systemd-nspawn is not installed: apt-get install systemd-container")


class Machine:
    """One booted machine; `boot` makes and removes it."""

    def __init__(self, name: str, root: Path, leader: int) -> None:
        self.name = name
        self.root = root
        """Its file system, as seen from here."""
        self._leader = leader

    def command(self, *command: str) -> list[str]:
        """A command that runs inside, as root."""
        return [
            "nsenter",
            "-t",
            str(self._leader),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-C",
            "--",
            *command,
        ]

    def try_run(
        self, *command: str, timeout_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, whatever comes of it."""
        return subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> str:
        """What a command prints; fails with all of it when it fails."""
        done = self.try_run(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def pid_outside(self, pid: int) -> int:
        """This host's number of a process inside."""
        space = os.readlink(f"/proc/{self._leader}/ns/pid")
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                numbers = [x for x in status.read_text().splitlines() if x.startswith("NSpid:")]
                here = os.readlink(status.with_name("ns") / "pid") == space
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended meanwhile, or is none of ours
            if here and numbers[0].split()[-1] == str(pid):
                return int(status.parent.name)
        raise AssertionError(f"no process is {pid} on {self.name}")

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.run("systemctl", "show", unit, "--property", ",".join(properties))
        return dict(line.split("=", 1) for line in text.splitlines())

    def journal(self, unit: str) -> str:
        """What a unit logged."""
        return self.try_run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def wait(
        self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = 60.0
    ) -> None:
        """Wait until something holds that has no event to wait for."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{self.name}: {what()}"
            time.sleep(0.05)


@contextmanager
def boot(base: Path, name: str, netns: str | None = None) -> Iterator[Machine]:
    """A running machine, in a network namespace that exists already or in one of its own."""
    require()
    base.mkdir(parents=True)
    _do("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(base))
    root = base / "root"
    try:
        for part in ("up", "work", "root"):
            (base / part).mkdir()
        layers = f"lowerdir=/,upperdir={base}/up,workdir={base}/work"
        _do("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        _prepare(root, name)
        with _started(base, root, name, netns) as leader:
            yield Machine(name, root, leader)
    finally:
        for mounted in (root, base):
            _do("umount", "-l", str(mounted))


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_S)


def _prepare(root: Path, name: str) -> None:
    """No service of this host starts on the machine; Python can be read by everybody."""
    for unit in (root / "etc/systemd/system/multi-user.target.wants").glob("*.service"):
        unit.unlink()
    (root / "etc/hostname").write_text(name + "\n")
    (root / "etc/machine-id").write_text(uuid.uuid4().hex + "\n")
    for path in (Path(sys.executable), Path(sys.base_prefix), REPOSITORY):
        for parent in path.parents:
            inside = root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o011)


@contextmanager
def _started(base: Path, root: Path, name: str, netns: str | None) -> Iterator[int]:
    network = (
        "--private-network" if netns is None else f"--network-namespace-path=/run/netns/{netns}"
    )
    log = base / "nspawn.log"
    # A cgroup of its own: the units of two machines may have the same names.
    own = f"rallypoint-{name}-{uuid.uuid4().hex[:8]}"
    groups = [hierarchy / own for hierarchy in _CGROUPS]
    for group in groups:
        group.mkdir()
    enter = " && ".join(f"echo $$ >{group}/cgroup.procs" for group in groups)
    with log.open("wb") as output:
        nspawn = subprocess.Popen(
            [
                *("/bin/sh", "-c", f'{enter} && exec "$@"', "sh"),
                *("timeout", "-k", "5", str(LIFE_S), "systemd-nspawn", "-q", "--register=no"),
                *("--keep-unit", "-M", own, "-D", str(root), network),
                *("--resolv-conf=off", "--timezone=off", "--link-journal=no", "-b"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    leader = 0
    try:
        deadline_s = time.monotonic() + BOOT_S
        while True:
            leader = _child(_child(nspawn.pid))  # the first one is not the one that stays
            state = leader and Machine(name, root, leader).try_run("systemctl", "is-system-running")
            if state and state.stdout.strip() in ("running", "degraded"):
                break
            assert nspawn.poll() is None, f"{name} did not start: {log.read_text()}"
            assert time.monotonic() < deadline_s, f"{name} did not boot: {log.read_text()}"
            time.sleep(0.1)
        yield leader
    finally:
        if leader:
            os.kill(leader, signal.SIGKILL)
        nspawn.terminate()
        nspawn.wait(10)
        for folder, _, _ in (x for group in groups for x in os.walk(group, topdown=False)):
            os.rmdir(folder)


def _child(pid: int) -> int:
    """The first child of a process, 0 where there is none."""
    if not pid:
        return 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0
    return int(children[0]) if children else 0
