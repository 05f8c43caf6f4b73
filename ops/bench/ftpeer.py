"""torchft in the place of the job: replica groups of one worker each, one killed or stopped.

As a module this drives it; as a program (``python -m rallypoint.ops.bench.ftpeer lighthouse …`` and
``… worker …``) it is its lighthouse, or one of its workers, which run the loop of `peer` with torchft's
manager, process group and optimiser around it. Nothing here is used by the product. torchft starts no
worker again by itself: the driver does, at once.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.job import JournalReader
from rallypoint.ops.bench.peer import CALM_S, WARM_UP_BOUND_S, small_network
from rallypoint.ops.bench.processes import BenchError, Deadline

BOUND_S: Final = 120.0
"""How long the survivors of a blow are waited for: torchft's own timeout of a collective is 60 s."""
JOIN_MS: Final = 100
"""How long the lighthouse waits for others before it goes on with those that are there (its default, in
its Python server)."""
_POLL_S: Final = 0.02
_PACE_S: Final = 0.01
_PROGRAM: Final = ("-m", "rallypoint.ops.bench.ftpeer")

What = Literal["killed", "stopped"]


@dataclass(frozen=True)
class Blow:
    """A worker was killed (SIGKILL) or fell silent (SIGSTOP)."""

    what: What
    survivors_s: float | None
    """Until every survivor had committed a step without it; None: not within `BOUND_S`."""
    complete_s: float | None
    """Until all, its successor among them, had committed a step together."""
    survivors_kept: bool
    """All of them are the processes that they were."""


class Group:
    """The lighthouse, and a worker in each place."""

    def __init__(self, directory: Path, site: Path | None, workers: int) -> None:
        path = os.environ.get("PYTHONPATH", "")
        self._extra = {"PYTHONPATH": path if site is None else f"{site}{os.pathsep}{path}"}
        self._log, self._steps = directory / "torchft.log", directory / "steps.jsonl"
        self._reader = JournalReader(self._steps)
        self._address = directory / "lighthouse"
        self._seat = self._start("lighthouse", str(self._address))
        self.workers: list[subprocess.Popen[bytes]] = []
        try:
            self._wait("the lighthouse", self._address.exists)
            for number in range(workers):
                self.workers.append(self._start(*self._worker(number)))
        except BaseException:  # whatever it is: no process is left behind
            self.close()
            raise

    def _worker(self, number: int) -> tuple[str, ...]:
        return ("worker", self._address.read_text(), str(self._steps), f"replica-{number}-")

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return processes.start((sys.executable, *_PROGRAM, *arguments), self._log, self._extra)

    def _wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = Deadline(f"{what} of torchft", WARM_UP_BOUND_S, self._log)
        while not reached():
            deadline.check()
            if any(process.poll() is not None for process in (self._seat, *self.workers)):
                raise BenchError(f"a process of torchft ended: {processes.tail(self._log)}")
            time.sleep(_POLL_S)

    def pids(self) -> dict[int, int]:
        """Processes by place."""
        return {number: worker.pid for number, worker in enumerate(self.workers)}

    def wait_complete(self, since_s: float) -> float:
        """Until all have committed a step together after this moment; when that was."""
        count, found = len(self.workers), [0.0]
        self._reader.lines.clear()

        def reached() -> bool:
            at_s = self._together(set(self.pids().values()), count, since_s)
            found[0] = at_s or 0.0
            return at_s is not None

        self._wait("all workers", reached)
        return found[0]

    def _together(self, pids: set[int], world: int, since_s: float) -> float | None:
        self._reader.read()
        return together(self._reader.lines, pids, world, since_s)

    def strike(self, number: int, what: What) -> Blow:
        """Kill or stop a worker, wait for the others, and give it a successor."""
        victim = self.workers[number]
        self._reader.read()
        self._reader.lines.clear()
        survivors = {pid for other, pid in self.pids().items() if other != number}
        blow_s = time.monotonic()
        victim.send_signal(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        after_s = None
        while after_s is None and time.monotonic() < blow_s + BOUND_S:
            after_s = self._together(survivors, len(survivors), blow_s)
            time.sleep(_POLL_S)
        kept = all(w.poll() is None for other, w in enumerate(self.workers) if other != number)
        victim.kill()
        victim.wait()
        again_s = time.monotonic()
        for other, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[other] = self._start(*self._worker(other))
        complete_s = self.wait_complete(again_s)
        return Blow(
            what=what,
            survivors_s=None if after_s is None else after_s - blow_s,
            complete_s=complete_s - blow_s,
            survivors_kept=kept,
        )

    def close(self) -> None:
        """End all of it."""
        for process in (*self.workers, self._seat):
            process.kill()
            process.wait()


def together(
    steps: Sequence[Mapping[str, Any]], pids: set[int], world: int, since_s: float
) -> float | None:
    """When the last of these processes committed its first step in a world of that size after this
    moment; None: not all have."""
    firsts: dict[int, float] = {}
    for step in steps:
        if step["at_s"] > since_s and step["world"] == world and step["pid"] in pids:
            firsts.setdefault(step["pid"], step["at_s"])
    return max(firsts.values()) if firsts.keys() == pids else None


def version(site: Path | None) -> str:
    """That of torchft, there or among our own packages. Raises `ConfigError` where it is not."""
    where = sys.path if site is None else [str(site)]
    found = (d for d in metadata.distributions(path=where) if d.name.startswith("torchft"))
    there = next(found, None)
    if there is None:
        text = f"torchft is not {'here' if site is None else f'in {site}'}; `pip install --target DIR torchft`"
        raise ConfigError(f"{text}, and --peer DIR")
    return f"{there.name} {there.version}"


def measure(
    directory: Path,
    site: Path | None,
    *,
    workers: int,
    kills: int,
    stops: int,
    seed: int,
    show: Callable[[Blow], None],
) -> list[Blow]:
    """One run: the kills, then the stops, each of a worker of the draw. ``site`` is where torchft is, if
    not among our own packages. Raises `BenchError`."""
    rng = random.Random(seed)  # noqa: S311 - draws victims, no secret
    found: list[Blow] = []
    with ExitStack() as stack:
        group = Group(directory, site, workers)
        stack.callback(group.close)
        for number in range(kills + stops):
            what: What = "killed" if number < kills else "stopped"
            group.wait_complete(time.monotonic())
            time.sleep(CALM_S)
            found.append(group.strike(rng.randrange(workers), what))
            show(found[-1])
    return found


def document(blows: Sequence[Blow], about: Mapping[str, Any]) -> dict[str, Any]:
    """The result as JSON has it."""
    return {**about, "blows": [asdict(blow) for blow in blows]}


def line_text(blow: Blow) -> str:
    """One blow, as it is over."""
    return (
        f"{blow.what}: survivors step again after {_s(blow.survivors_s)}, all after "
        f"{_s(blow.complete_s)}{'' if blow.survivors_kept else '; a survivor ended'}"
    )


def text(document: Mapping[str, Any]) -> str:
    """The result in a line for each kind of blow."""
    lines = []
    for what in ("killed", "stopped"):
        blows = [blow for blow in document["blows"] if blow["what"] == what]
        took = sorted(b["survivors_s"] for b in blows if b["survivors_s"] is not None)
        if blows:
            lines.append(
                f"torchft, {document['workers']} workers, {len(blows)} {what}: survivors stepped again "
                f"within {BOUND_S:g} s in {len(took)}, median {_s(median(took) if took else None)}, most "
                f"{_s(took[-1] if took else None)}; survivors kept: "
                f"{sum(b['survivors_kept'] for b in blows)}"
            )
    return "\n".join(lines) or "nothing was asked for"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def _lighthouse(address: Path) -> None:
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS)
    port = server.address().rpartition(":")[2].strip("/")
    new = address.with_suffix(".new")
    new.write_text(f"http://127.0.0.1:{port}")
    new.replace(address)
    signal.pause()


def _worker(lighthouse: str, log: Path, name: str) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torchft import (  # type: ignore[import-not-found,unused-ignore]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_network()
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimiser"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimiser": inner.state_dict()},
        min_replica_size=1,
        replica_id=name,
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    module = DistributedDataParallel(manager, model)
    optimiser = Optimizer(manager, inner)
    while True:
        before = manager.current_step()
        optimiser.zero_grad()
        module(torch.randn(768, 48)).square().mean().backward()
        optimiser.step()
        if manager.current_step() > before:
            step = {
                "pid": os.getpid(),
                "world": manager.num_participants(),
                "at_s": time.monotonic(),
            }
            with log.open("a") as file:
                file.write(json.dumps(step) + "\n")
        time.sleep(_PACE_S)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        _lighthouse(Path(sys.argv[2]))
    else:
        _worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
