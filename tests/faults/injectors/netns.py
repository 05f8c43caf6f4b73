"""A job whose nodes and etcd servers have a network namespace each, and faults of the network between.

Every namespace has one interface, ``eth0``, whose other end is a port of a bridge in a namespace of its
own: nothing of it is in the machine's own network. A port that goes down is a pulled cable: nobody gets
a reset, and nobody's address goes away. Loss is done by nft rules of the host's own namespace, which
count what they drop. Needs root, iproute2 and nftables.
"""

import functools
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.fakes.etcd_server import EtcdCluster, Seat, cluster
from tests.faults.injectors.nodes import Nodes

NODES = ("a", "b", "c")
SERVERS = ("e0", "e1", "e2")
SUBNET = "10.77.0"
INTERFACE = "eth0"
BRIDGE = "br0"
OBSERVER = f"{SUBNET}.254"
"""Address of the bridge itself, from where etcdctl asks."""
COMMAND_S = 60.0

Direction = Literal["in", "out"]


def require() -> None:
    """Skip the test where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program, package in (("ip", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install {package}")
    probe = _done("unshare", "--net", "true")
    if probe.returncode:
        pytest.skip(f"no network namespace can be made here: {probe.stderr.strip()}")


class Network:
    """Hosts with one address each on one bridge; `network` makes and removes it."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"drillnet-{uuid.uuid4().hex[:8]}"
        self.addresses = {host: f"{SUBNET}.{n}" for n, host in enumerate(hosts, start=1)}

    def up(self) -> None:
        """Make the bridge and the hosts."""
        _run("ip", "netns", "add", self._bridge)
        inside = ("ip", "-n", self._bridge)
        _run(*inside, "link", "add", BRIDGE, "type", "bridge")
        _run(*inside, "addr", "add", f"{OBSERVER}/24", "dev", BRIDGE)
        for name in (BRIDGE, "lo"):
            _run(*inside, "link", "set", name, "up")
        for host in self.addresses:
            self._add(host)

    def _add(self, host: str) -> None:
        space, inside = self.space(host), ("ip", "-n", self._bridge)
        _run("ip", "netns", "add", space)
        peer = ("peer", "name", INTERFACE, "netns", space)
        _run(*inside, "link", "add", _port(host), "type", "veth", *peer)
        _run(*inside, "link", "set", _port(host), "master", BRIDGE, "up")
        address = f"{self.addresses[host]}/24"
        _run("ip", "-n", space, "addr", "add", address, "dev", INTERFACE)
        for name in (INTERFACE, "lo"):
            _run("ip", "-n", space, "link", "set", name, "up")

    def close(self) -> list[int]:
        """Remove all; the processes that were still in there. The caller ends its own before."""
        spaces = [*map(self.space, self.addresses), self._bridge]
        there = set(_run("ip", "netns", "list").split())
        left = []
        for space in (s for s in spaces if s in there):
            left += [int(pid) for pid in _run("ip", "netns", "pids", space).split()]
            _run("ip", "netns", "del", space)
        return left

    def processes(self, host: str) -> list[int]:
        """Everything that runs in the namespace of a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.space(host)).split()]

    def space(self, host: str) -> str:
        """The namespace of a host."""
        return f"{self._prefix}-{host}"

    def launcher(self, host: str) -> tuple[str, ...]:
        """What stands before a command that is to run on a host; it becomes that command."""
        return _enter(self.space(host))

    @property
    def observer(self) -> tuple[str, ...]:
        """The same for a command at the bridge, which no fault of a host reaches."""
        return _enter(self._bridge)

    # --- faults ----------------------------------------------------------------------------------

    def cut(self, *hosts: str) -> None:
        """Pull the cables of these hosts in one go, and see that they are out."""
        self._set_links("down", hosts)
        assert not any(self.linked(host) for host in hosts)

    def heal(self, *hosts: str) -> None:
        """Put the cables back, and see that they are in."""
        self._set_links("up", hosts)
        assert all(self.linked(host) for host in hosts)

    def _set_links(self, state: str, hosts: Sequence[str]) -> None:
        lines = "".join(f"link set {_port(host)} {state}\n" for host in hosts)
        _run("ip", "-n", self._bridge, "-batch", "-", told=lines)

    def linked(self, host: str) -> bool:
        """Whether this host's own interface has a carrier."""
        link: list[dict[str, Any]] = json.loads(
            _run("ip", "-n", self.space(host), "-j", "link", "show", INTERFACE)
        )
        return "LOWER_UP" in link[0]["flags"]

    def lose(
        self, host: str, direction: Direction, percent: int = 100, peer: str | None = None
    ) -> None:
        """From now on this share of the packets that a host gets, or sends, is dropped, at random; only
        of those from, or to, a peer where one is given."""
        hook, side, end = {
            "in": ("input", "iifname", "saddr"),
            "out": ("output", "oifname", "daddr"),
        }[direction]
        peers = "" if peer is None else f" ip {end} {self.addresses[peer]}"
        random = "" if percent == 100 else f" numgen random mod 100 < {percent}"
        rules = (
            "add table inet drill",
            f"add chain inet drill {direction} {{ type filter hook {hook} priority 0; }}",
            f"add counter inet drill {direction}",
            f"add rule inet drill {direction} {side} {INTERFACE}{peers}{random} counter name {direction} drop",
        )
        for rule in rules:
            self._nft(host, *rule.split(" "))

    def dropped(self, host: str) -> dict[str, int]:
        """Packets dropped by these rules so far, by direction."""
        found = json.loads(self._nft(host, "-j", "list", "counters", "table", "inet", "drill"))
        counters = (x["counter"] for x in found["nftables"] if "counter" in x)
        return {counter["name"]: counter["packets"] for counter in counters}

    def keep(self, host: str) -> dict[str, int]:
        """End the loss; the packets that it dropped."""
        dropped = self.dropped(host)
        self._nft(host, "delete", "table", "inet", "drill")
        return dropped

    def _nft(self, host: str, *words: str) -> str:
        return _run(*self.launcher(host), "nft", *words)

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}-{BRIDGE}"


class NetNodes(Nodes):
    """The nodes of one job, each on a host of its own."""

    def __init__(self, base: Path, etcd: EtcdCluster, network: Network, *options: str) -> None:
        super().__init__(base, etcd, *options)
        self.network = network
        self.spoilt = False
        """A drill has failed: what the next one would find says nothing."""

    def place(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        address = self.network.addresses[name]
        settings = (f"bind={address}", f"advertise={address}", f"interface={INTERFACE}")
        options = tuple(word for one in settings for word in ("--set", f"node.{one}"))
        return options, self.network.launcher(name)


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """These hosts, which are gone at the end of the block, as all that ran there must be."""
    made = Network(hosts)
    try:
        made.up()
        yield made
    finally:
        left = made.close()
    assert not left, f"processes {left} were left in their namespaces"


@contextmanager
def drill(
    base: Path,
    *options: str,
    hosts: Sequence[str] = NODES,
    etcd_options: Sequence[str] = (),
) -> Iterator[NetNodes]:
    """A job without nodes yet, on a healthy etcd of three servers, each with a host of its own.
    ``hosts``: for nodes; ``etcd_options`` go to each server."""
    require()
    with network((*hosts, *SERVERS)) as net:
        seats = [Seat(net.addresses[host], net.launcher(host)) for host in SERVERS]
        place = functools.partial(cluster, seats=seats, ctl_launcher=net.observer)
        with place(base / "etcd", 3, options=etcd_options) as etcd:
            job = NetNodes(base, etcd, net, *options)
            try:
                yield job
            finally:
                job.close()


def _port(host: str) -> str:
    return f"port-{host}"


def _enter(space: str) -> tuple[str, ...]:
    return "nsenter", f"--net=/run/netns/{space}", "--"


def _done(*command: str, told: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )


def _run(*command: str, told: str = "") -> str:
    done = _done(*command, told=told)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
