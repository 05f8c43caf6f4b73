"""A worker of the simulation: what it holds, what it hears, and what it says to its supervisor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.trainer.elastic.protocol import Whereabouts

if TYPE_CHECKING:
    from rallypoint.ops.simulation.cluster import Cluster
    from rallypoint.ops.simulation.group import Group
    from rallypoint.ops.simulation.node import Node


@dataclass(frozen=True)
class Snapshot:
    """A training state, by where it comes from."""

    iteration: int = 0
    digest: int = 0
    """Differs when anything differs that was ever put into the state."""
    branch: int = 0
    """The generation that restored, or began, what this state continues."""


class Worker:
    """One process. ``node`` is where it runs."""

    def __init__(self, cluster: "Cluster", node: "Node", key: WorkerKey) -> None:
        self.cluster = cluster
        self.node = node
        self.key = key
        self.alive = True
        self.reaped = False
        """Its supervisor knows that it is gone."""
        self.phase: Literal["booting", "idle", "grouped"] = "booting"
        self._warm = False
        self.stopped = False
        """SIGSTOP: it does nothing, but its port still accepts."""
        self.connected = False
        self.plan: Plan | None = None
        self.marked = 0
        """Newest formed mark heard."""
        self.group: Group | None = None
        self.idle_since_s = 0.0
        self.last_formed = 0
        self.broken_generation = 0
        self.state = Snapshot()
        self.held: Snapshot | None = None
        """The result of the last collective of the iteration after ``state``."""
        self.held_stop = False
        """That collective said that all stop."""
        self.stop_asked = False
        self.stop_agreed = False
        """An iteration was committed in which all learned that the job stops."""
        self.formed_iteration = 0
        self.said_until_s = 0.0
        self.told_until_s = 0.0
        self._unread: list[Callable[[Worker], None]] = []
        """What was said to it while it was stopped."""

    # --- what it hears ----------------------------------------------------------------------------

    def told(self, say: "Callable[[Worker], None]") -> None:
        """Something its supervisor says has arrived."""
        if self.stopped:
            self._unread.append(say)
        elif self.alive:
            say(self)

    def ready_for_s(self) -> float:
        """How long it has been warm and free; 0 while it is not."""
        free = self.phase == "idle" and self.connected and not self.stopped
        return self.cluster.clock.now - self.idle_since_s if free else 0.0

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        unread, self._unread = self._unread, []
        for say in unread:
            self.told(say)
        self.boot_again()
        self.enter()
        if self.group is not None:
            self.group.go_on()

    def hear(self, plan: Plan) -> None:
        """A plan, whether or not it lists this worker."""
        if self.plan is not None and plan.generation <= self.plan.generation:
            return
        self.plan = plan
        group = self.group
        over = group is not None and plan.ends_below > group.plan.generation
        if group is not None and (over or not group.formed_here(self)):
            group.leave(self, "released")
        elif group is not None:
            group.go_on()  # one that holds leaves at once
        self.enter()

    def hear_mark(self, generation: int) -> None:
        """``job.formed`` as its supervisor read it."""
        self.marked = max(self.marked, generation)
        if self.group is not None:
            self.group.go_on()

    def hear_stop(self) -> None:
        """The supervisor asks for a stop by agreement."""
        self.stop_asked = True
        if self.group is not None:
            self.group.go_on()

    def hear_commit(self) -> None:
        """The supervisor asks rank 0 for a checkpoint now."""
        group = self.group
        if group is not None and group.formed_here(self) and group.rank0 is self:
            self.cluster.checkpoints.save(self, group, lambda saved: None)

    def leave(self, reason: str) -> None:
        """The supervisor sends it home."""
        if self.alive and not self.stopped:
            self.say(ev.WorkerLeft(self.key, self.state.iteration, reason))
            self.cluster.end(self, reason, code=0)

    def enter(self) -> None:
        """Arrive at the newest plan, if that lists this worker and it is free."""
        plan = self.plan
        if plan is None or self.phase != "idle" or not self.alive or self.stopped:
            return
        newest = max(self.broken_generation, self.last_formed)
        if plan.generation > newest and plan.find(self.key) is not None:
            self.cluster.group(plan).arrive(self)

    # --- what it does ------------------------------------------------------------------------------

    def commit(self, state: Snapshot, *, stop: bool) -> None:
        """This is its state now."""
        self.state, self.held = state, None
        self.stop_agreed = self.stop_agreed or stop

    def boot(self) -> None:
        """Past warm-up: env built, one iteration done."""
        self._warm = True
        self.boot_again()

    def boot_again(self) -> None:
        """Say ready, if that could not be said before."""
        if self.alive and self._warm and not self.stopped and self.phase == "booting":
            self.phase = "idle"
            self.idle_since_s = self.cluster.clock.now
            if self.connected:
                self.say(self.ready())
                self.enter()

    def greet(self) -> None:
        """Hello: the supervisor is told everything that an earlier one may have known."""
        if not self.alive or not self.node.up:
            return
        if self.stopped:
            self._unread.append(Worker.greet)
            return
        self.connected = True
        self.idle_since_s = self.cluster.clock.now
        self.say(ev.WorkerConnected(self.key))
        if self.phase == "booting":
            return
        self.say(self.ready())
        if self.last_formed:
            iteration = self.formed_iteration
            self.say(ev.WorkerFormed(self.key, self.last_formed, "hash", iteration))
            if self.state.iteration > iteration:
                self.say_committed()
        if self.broken_generation:
            self.say(ev.WorkerBroke(self.key, self.broken_generation, "said before"))

    def ready(self) -> ev.WorkerBecameReady:
        """What it says when warm, and at each Hello after that."""
        checkpoint = self.cluster.readable(self.node)
        found = None if checkpoint is None else (checkpoint.generation, checkpoint.state.iteration)
        port = 5000 + self.key.slot
        return ev.WorkerBecameReady(
            self.key, self.node.name, port, "cpu", 0, self.last_formed, found
        )

    def say(self, event: ev.NodeEvent) -> None:
        """To the supervisor, in order; lost when that dies first (Hello says it again)."""
        clock, node = self.cluster.clock, self.node
        if self.connected and node.up:
            at_s = max(self.said_until_s, clock.now + self.cluster.local_s())
            self.said_until_s = at_s
            clock.after(at_s - clock.now, node.alive(lambda: node.decide(event)))

    def say_committed(self) -> None:
        """An iteration is committed here."""
        self.say(ev.WorkerCommitted(self.key, self.last_formed, self.state.iteration, 0))

    def broke(self, generation: int, error: str) -> None:
        """A collective of this generation failed here."""
        self.broken_generation = max(self.broken_generation, generation)
        self.say(ev.WorkerBroke(self.key, generation, error))
        self.enter()

    def whereabouts(self) -> Whereabouts:
        """What it brings along to a new generation."""
        found = self.cluster.readable(self.node)
        return Whereabouts(
            key=self.key,
            last_formed=self.last_formed,
            prepared=self.state.iteration if self.held is None else self.held.iteration,
            committed=self.state.iteration,
            in_hand=(),
            checkpoint=None if found is None else (found.generation, found.state.iteration),
        )
