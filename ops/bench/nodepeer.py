"""The peer of ``bench recovery --nodes``: an agent of torchrun with one worker for each node, c10d
rendezvous, one node lost. The agent that hosts the rendezvous store is spared: without it none comes
back."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rallypoint.ops.bench import peer, processes
from rallypoint.ops.bench.network import Place
from rallypoint.ops.bench.peer import BOUND_S, CALM_S, LIFE_S, WARM_UP_BOUND_S
from rallypoint.ops.bench.processes import Deadline

_POLL_S: Final = 0.05
_PORT: Final = 29507


@dataclass(frozen=True)
class PeerLoss:
    """One lost node under torchrun."""

    all_s: float | None
    """Until every survivor had made a step in one world of them; None: not within `BOUND_S`."""


def measure(
    directory: Path,
    places: Sequence[Place],
    names: Sequence[str],
    cut: Callable[[str], None] | None,
) -> PeerLoss:
    """Start the agents, lose the last one (``cut`` pulls its cable; None: it is killed with its worker),
    and wait. Raises `BenchError` when they do not even begin to train."""
    directory.mkdir(parents=True, exist_ok=True)
    log, steps = directory / "torchrun.log", directory / "steps.jsonl"
    count, store = len(places), places[0].address
    agents = []
    try:
        for number, place in enumerate(places):
            command = [
                *(*place.launcher, sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes=1:{count}", "--nproc-per-node=1", "--max-restarts=5"),
                *("--rdzv-backend=c10d", "--rdzv-id=bench", f"--rdzv-endpoint={store}:{_PORT}"),
                f"--rdzv-conf=is_host={int(number == 0)}",
                *(f"--local-addr={place.address}", peer.__file__, str(steps), str(LIFE_S), "gloo"),
            ]
            agents.append(processes.start(command, log, {"GLOO_SOCKET_IFNAME": place.interface}))
        deadline = Deadline("training under torchrun", WARM_UP_BOUND_S, log)
        while len(_of_world(peer.first_steps(steps), count)) < count:
            deadline.check()
            time.sleep(_POLL_S)
        time.sleep(CALM_S)
        lost = [agents[-1].pid, *processes.descendants(agents[-1].pid)]
        blow_s = time.monotonic()
        if cut is not None:
            cut(names[-1])
        else:
            for pid in lost:
                os.kill(pid, signal.SIGKILL)
        while time.monotonic() < blow_s + BOUND_S:
            back = _of_world(peer.first_steps(steps), count - 1, after_s=blow_s)
            if len(back) >= count - 1:
                return PeerLoss(max(step["at_s"] for step in back) - blow_s)
            time.sleep(_POLL_S)
        return PeerLoss(None)
    finally:
        for agent in agents:
            processes.end(agent, 15.0)
        peer.end_workers(peer.first_steps(steps))


def _of_world(
    steps: Sequence[dict[str, Any]], world: int, after_s: float = 0.0
) -> list[dict[str, Any]]:
    """The first steps of lives in a world of this size."""
    return [step for step in steps if step["world"] == world and step["at_s"] > after_s]
