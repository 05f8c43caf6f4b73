"""A process with many light supervisors: ``python -m rallypoint.ops.bench.nodeprocess DIR FIRST COUNT
SETTING…``, told what to do by JSON lines on its standard input, answering with a line each."""

import asyncio
import os
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from rallypoint.daemon.executors import logs, policies
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.config import Config
from rallypoint.ops.bench.lightnode import Fact, LightNode

STARTED_AT_ONCE = 16


class Order(msgspec.Struct, frozen=True):
    """What the benchmark asks of a process."""

    do: Literal["start", "lose", "break", "report", "forget"]
    node: str = ""
    """start, lose: this node; start: "" means all."""
    silently: bool = False
    """lose: the lease stays."""
    generation: int = 0
    """break: the generation that is broken; forget: what was seen of those before it."""


class Reach(msgspec.Struct):
    """How far a plan, or a formed mark, has come among the nodes of one process."""

    world_size: int
    count: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    """Monotonic."""


class Report(msgspec.Struct, frozen=True):
    """The state of a process."""

    cpu_s: float
    """CPU time of the process so far."""
    at_s: float
    """Monotonic: now; for ``lose``: right before it."""
    leader: str = ""
    """The leader's node, if it is one of these."""
    plan: dict[int, Reach] = {}
    """By generation."""
    mark: dict[int, Reach] = {}
    plan_bytes: int = 0
    """Size of the newest plan in the store."""


def node_name(index: int) -> str:
    """Name of the node with this number, counted from 0."""
    return f"n{index:04d}"


@dataclass
class NodeProcess:
    """The nodes, and what they have seen."""

    config: Config
    directory: Path
    names: list[str]
    nodes: dict[str, LightNode] = field(default_factory=dict)
    seen: dict[Fact, dict[int, Reach]] = field(default_factory=lambda: {"plan": {}, "mark": {}})

    async def obey(self, order: Order) -> Report:
        """Do it, and say how things are."""
        at_s = time.monotonic()
        if order.do == "start":
            await self._start([order.node] if order.node else self.names)
        elif order.do == "lose":
            await self.nodes.pop(order.node).end(silently=order.silently)
        elif order.do == "break":
            for node in self.nodes.values():
                node.break_generation(order.generation)
        elif order.do == "forget":
            for facts in self.seen.values():
                for generation in [g for g in facts if g < order.generation]:
                    del facts[generation]
        return self._report(at_s if order.do == "lose" else time.monotonic())

    def _report(self, at_s: float) -> Report:
        leads = next(((name, node) for name, node in self.nodes.items() if node.leads), None)
        return Report(
            cpu_s=time.process_time(),
            at_s=at_s,
            leader="" if leads is None else leads[0],
            plan=self.seen["plan"],
            mark=self.seen["mark"],
            plan_bytes=0 if leads is None else leads[1].plan_bytes,
        )

    async def _start(self, names: list[str]) -> None:
        versions = policies.installed_versions()
        for begin in range(0, len(names), STARTED_AT_ONCE):
            group = [self._make(n, versions) for n in names[begin : begin + STARTED_AT_ONCE]]
            await asyncio.gather(*(node.start() for node in group))

    def _make(self, name: str, versions: dict[str, str]) -> LightNode:
        config = replace(self.config, node=replace(self.config.node, name=name))
        node = LightNode(config, self.directory / name, versions, self._note)
        self.nodes[name] = node
        return node

    def _note(self, fact: Fact, generation: int, world_size: int, at_s: float) -> None:
        reach = self.seen[fact].setdefault(generation, Reach(world_size, 0, at_s, at_s))
        reach.world_size = max(reach.world_size, world_size)
        reach.count += 1
        reach.last_s = at_s


async def serve(process: NodeProcess) -> None:
    """Obey until standard input ends. Raises what a node raised."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    loop.set_exception_handler(_fail)
    while line := await reader.readline():
        report = await process.obey(msgspec.json.decode(line, type=Order))
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A node failed: nothing that is measured from here on would mean anything."""
    loop.default_exception_handler(context)
    sys.stderr.flush()
    os._exit(1)


def main(directory: Path, first: int, count: int, settings: list[str]) -> None:
    """Run the nodes ``first`` to ``first + count - 1``."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three descriptors a node
    given = [configload.parse_assignment(setting) for setting in settings]
    config = configload.load(command_line=given).config
    logs.configure(config.log, lambda _: {})
    names = [node_name(index) for index in range(first, first + count)]
    asyncio.run(serve(NodeProcess(config, directory, names)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
