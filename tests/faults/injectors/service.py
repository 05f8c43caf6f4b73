"""A job as a service of a machine: an instance of the unit, installed as its page says."""

import signal
import sys
from collections.abc import Callable
from typing import Any

from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from tests.faults.injectors.machine import REPOSITORY, Machine

FOLDER = REPOSITORY / "systemd"
PREFIX = "/opt/rallypoint"
PROGRAM = f"""#!/bin/sh
export PYTHONPATH={REPOSITORY}/src
exec {sys.executable} -m rallypoint.daemon.cli "$@"
"""
JOB = """
[job]
seed = 1
[env]
task = "pointmass"
num_envs = 16
[ppo]
hidden = [16, 16]
rollout_steps = 8
[checkpoint]
every_iterations = 20
[membership]
orphan_grace_s = 60.0
hang_s = 30.0
[metrics]
port = 0
"""
# The tests' Python may live in somebody's home; installed ones do not.
HERE = "[Service]\nProtectHome=no\nEnvironment=MUJOCO_GL=disable\n"


class Service:
    """One job on a machine: an instance of the unit."""

    def __init__(self, machine: Machine, job: str, *, drop_in: str = "", config: str = JOB) -> None:
        self.machine = machine
        self.job = job
        self.unit = f"rallypoint@{job}.service"
        self.directory = f"/var/lib/rallypoint/{job}"
        self.seen = machine.root / self.directory[1:]
        """The same directory, from here."""
        self.write(f"etc/rallypoint/{job}.toml", config)
        self.write(f"etc/systemd/system/{self.unit}.d/test.conf", HERE + drop_in)
        machine.run("systemctl", "daemon-reload")

    def write(self, path: str, text: str) -> None:
        """A file of the machine."""
        inside = self.machine.root / path
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.write_text(text)

    def start(self) -> None:
        """Start it and wait until it trains."""
        self.machine.run("systemctl", "start", self.unit)
        self.trains()

    def status(self) -> dict[str, Any]:
        """What ``rallypoint status`` shows; nothing while no supervisor answers."""
        try:
            with AdminClient(self.seen) as client:
                document: dict[str, Any] = client.ask(command="status")["status"]
        except NoSupervisorError:
            return {}
        return document

    def trains(self, beyond: int = 0, count: int = 2) -> dict[str, Any]:
        """Wait until so many workers train, past this iteration; the status then."""
        seen: dict[str, Any] = {}

        def reached() -> bool:
            seen.clear()
            seen.update(self.status())
            workers = seen.get("workers", [])
            training = [w["state"] for w in workers].count("training")
            return training == len(workers) == count and (seen["iteration"] or 0) > beyond

        self.machine.wait(reached, lambda: f"{seen}\n{self.log()[-3000:]}", 120)
        return dict(seen)

    def pids(self) -> set[int]:
        """Pids of the workers, in the machine's own numbers."""
        return {w["pid"] for w in self.status().get("workers", ())}

    def log(self) -> str:
        """All that it, and systemd about it, wrote."""
        return self.machine.journal(self.unit)

    @property
    def main_pid(self) -> int:
        return int(self.show("MainPID"))

    def show(self, name: str) -> str:
        return self.machine.show(self.unit, name)[name]

    def alive(self, pids: set[int]) -> set[int]:
        """Those that run."""
        listed = self.machine.run("ps", "-eo", "pid=,stat=").splitlines()
        running = {int(pid) for pid, state in map(str.split, listed) if not state.startswith("Z")}
        return pids & running

    def kill(self, pid: int, number: signal.Signals) -> None:
        """A signal to a process of the machine."""
        self.machine.run("kill", f"-{number.name.removeprefix('SIG')}", str(pid))

    def fire(self, failpoint: str, then: Callable[[], None] = lambda: None) -> None:
        """Arm a failpoint, do what leads to it, and wait until it fires."""
        self.write(f"{self.directory[1:]}/failpoints", failpoint)
        then()
        self.machine.wait((self.seen / "fired").exists, lambda: f"{failpoint} did not fire")

    def stop(self) -> None:
        """Stop it; systemd must find its end in order. (What `show` knows is gone with an instance.)"""
        self.machine.run("systemctl", "stop", self.unit, timeout_s=150)
        word = f"{self.unit}: Deactivated successfully"
        self.machine.wait(lambda: word in self.log(), lambda: self.log()[-3000:], 20)


def install(machine: Machine) -> None:
    """What systemd/README.md tells a newcomer to do, with this tree in place of the package."""
    root = machine.root
    program = root / f"{PREFIX}/bin/rallypoint"[1:]
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    copies = {
        "rallypoint@.service": "etc/systemd/system/rallypoint@.service",
        "rallypoint.sysusers.conf": "etc/sysusers.d/rallypoint.conf",
        "rallypoint.tmpfiles.conf": "etc/tmpfiles.d/rallypoint.conf",
    }
    for name, place in copies.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text((FOLDER / name).read_text())
    machine.run("systemd-sysusers", "rallypoint.conf")
    machine.run("systemd-tmpfiles", "--create", "rallypoint.conf")
    secret = root / "etc/rallypoint/credentials/etcd-password"
    secret.write_text("open sesame\n")
    secret.chmod(0o600)
