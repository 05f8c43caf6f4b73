"""Checkpoints of the simulation: who may write one, when it lands, who can read it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core import permission
from rallypoint.ops.simulation.worker import Snapshot, Worker

if TYPE_CHECKING:
    from rallypoint.ops.simulation.cluster import Cluster
    from rallypoint.ops.simulation.group import Group
    from rallypoint.ops.simulation.node import Node


@dataclass(frozen=True)
class Checkpoint:
    """A manifest with everything it names."""

    generation: int
    state: Snapshot
    node: int
    """Where it lies, when checkpoints are not shared."""
    landed_s: float


class Checkpoints:
    """All that were ever committed."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.landed: list[Checkpoint] = []
        self._newest: dict[int, Checkpoint] = {}

    def readable(self, node: "Node") -> Checkpoint | None:
        """The newest that workers of this node can read, by (generation, iteration)."""
        shared = self._cluster.scenario.shared_checkpoints
        return self._newest.get(-1 if shared else node.index)

    def save(self, worker: Worker, group: "Group", done: Callable[[bool], None]) -> None:
        """Ask the own supervisor, then put the manifest: late, and sometimes after the writer's end."""
        cluster, node, state = self._cluster, worker.node, worker.state
        generation = group.plan.generation

        def ask() -> None:
            refusal = "no supervisor"
            if node.up and worker.connected:
                now = cluster.clock.now
                refusal = permission.commit_refusal(node.state, worker.key, generation, now)
            if refusal or not worker.alive:
                cluster.log(
                    f"{worker.key} may not save ({generation}, {state.iteration}): {refusal}"
                )
                done(False)
                return
            cluster.checks.acts_under_lease(node, f"{worker.key} may save")
            late = cluster.choose.random() < 0.1
            delay_s = (
                cluster.choose.uniform(0.5, 20.0) if late else cluster.choose.uniform(0.01, 0.2)
            )
            cluster.clock.after(delay_s, put)

        def put() -> None:
            in_time = worker.alive and node.machine
            if not in_time and cluster.choose.random() < 0.5:
                done(False)
                return
            self._land(Checkpoint(generation, state, node.index, cluster.clock.now))
            if in_time:
                worker.say(ev.WorkerCheckpointed(worker.key, generation, state.iteration))
            done(in_time)

        cluster.clock.after(cluster.local_s(), ask)

    def _land(self, checkpoint: Checkpoint) -> None:
        cluster = self._cluster
        cluster.log(f"checkpoint {checkpoint} lands")
        cluster.checks.landed(checkpoint)
        self.landed.append(checkpoint)
        place = -1 if cluster.scenario.shared_checkpoints else checkpoint.node
        before = self._newest.get(place)
        rank = (checkpoint.generation, checkpoint.state.iteration)
        if before is None or rank > (before.generation, before.state.iteration):
            self._newest[place] = checkpoint
