"""Hosts that are network namespaces of this machine, on one bridge in a namespace of its own: a cable can
be pulled, and nothing of it is in the machine's own network. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from rallypoint.ops.bench.processes import BenchError

_COMMAND_S: Final = 20.0
_SUBNET: Final = "10.78.0"


@dataclass(frozen=True)
class Place:
    """Where a process runs, and how others reach it there."""

    address: str
    interface: str
    launcher: tuple[str, ...] = ()
    """Stands before a command that is to run there; becomes that command."""


LOOPBACK: Final = Place("127.0.0.1", "lo")


def possible() -> bool:
    """Whether namespaces can be made here."""
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None or not (shutil.which("ip") and shutil.which("nsenter")):
        return False
    tried = subprocess.run([unshare, "--net", "true"], check=False, timeout=_COMMAND_S)
    return tried.returncode == 0


class Network:
    """The hosts, by name, from ``with`` to the end of the block; ``hub`` is the bridge itself. Whatever
    runs there must have ended before. Raises `BenchError` when a command of iproute2 fails."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"rallypoint-bench-{os.getpid()}"
        self._hub = f"{self._prefix}-hub"
        self.hub = Place(f"{_SUBNET}.254", "br0", _enter(self._hub))
        self.places = {
            name: Place(f"{_SUBNET}.{number}", "eth0", _enter(self._space(name)))
            for number, name in enumerate(names, start=1)
        }

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:  # whatever it was: nothing is left behind
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def cut(self, name: str) -> None:
        """Pull the cable of a host: nobody gets a reset, and nobody's address goes away."""
        _ip("-n", self._hub, "link", "set", _port(name), "down")

    def heal(self, name: str) -> None:
        """Put the cable back."""
        _ip("-n", self._hub, "link", "set", _port(name), "up")

    def _make(self) -> None:
        hub = ("-n", self._hub)
        _ip("netns", "add", self._hub)
        _ip(*hub, "link", "add", self.hub.interface, "type", "bridge")
        _ip(*hub, "addr", "add", f"{self.hub.address}/24", "dev", self.hub.interface)
        for link in (self.hub.interface, "lo"):
            _ip(*hub, "link", "set", link, "up")
        for name, place in self.places.items():
            space = self._space(name)
            _ip("netns", "add", space)
            peer = ("peer", "name", place.interface, "netns", space)
            _ip(*hub, "link", "add", _port(name), "type", "veth", *peer)
            _ip(*hub, "link", "set", _port(name), "master", self.hub.interface, "up")
            _ip("-n", space, "addr", "add", f"{place.address}/24", "dev", place.interface)
            for link in (place.interface, "lo"):
                _ip("-n", space, "link", "set", link, "up")

    def _remove(self) -> None:
        there = set(_ip("netns", "list").split())
        for space in (*map(self._space, self.places), self._hub):
            if space in there:
                _ip("netns", "del", space)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


def _enter(space: str) -> tuple[str, ...]:
    return ("nsenter", f"--net=/run/netns/{space}")


def _port(name: str) -> str:
    return f"port-{name}"


def _ip(*words: str) -> str:
    done = subprocess.run(
        [shutil.which("ip") or "ip", *words],
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
