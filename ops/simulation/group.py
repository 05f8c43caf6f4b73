"""The members of one generation, from arriving to its end: forming and training as one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.ops.simulation import endings
from rallypoint.ops.simulation.errors import Violation
from rallypoint.ops.simulation.scenario import HANG_S
from rallypoint.ops.simulation.worker import Snapshot, Worker
from rallypoint.trainer.elastic.protocol import Decision, decide_source
from rallypoint.trainer.errors import TrainerError

if TYPE_CHECKING:
    from rallypoint.ops.simulation.cluster import Cluster

_CLOSED_S: Final = 0.05
"""A closed connection is noticed within this time, in a group that trains."""
_INIT_S: Final = 1.0
"""The same while the group is being built."""


class Group:
    """One generation, as far as it exists in workers."""

    def __init__(self, cluster: "Cluster", plan: Plan) -> None:
        self.cluster = cluster
        self.plan = plan
        self.here: dict[WorkerKey, Worker] = {}
        """Members that have arrived and not left."""
        self.came: set[WorkerKey] = set()
        self.formed: set[WorkerKey] = set()
        self.covered = not plan.commit_first
        """The state is committed under this generation's number, where the plan asks for that first."""
        self._warned: set[WorkerKey] = set()
        """Members that are about to notice a closed connection."""
        self._forming = False
        self._iterating = False
        self._saved_hold = False
        self.progress_s = cluster.clock.now
        """When anything moved last."""
        self.broken_s: float | None = None
        """When the first member left it that had formed it."""
        self.last_iteration_s = 0.0
        """When an iteration ended last."""
        cluster.clock.after(HANG_S, self._watch)

    # --- coming and going --------------------------------------------------------------------------

    def arrive(self, worker: Worker) -> None:
        """A member is there."""
        worker.group, worker.phase = self, "grouped"
        self.here[worker.key] = worker
        self.came.add(worker.key)
        self.progress_s = self.cluster.clock.now
        self.go_on()

    def formed_here(self, worker: Worker) -> bool:
        """Whether this member has formed this generation."""
        return worker.key in self.formed

    def leave(self, worker: Worker, why: str, *, silent: bool = False) -> None:
        """A member goes. The others notice a closed connection, unless it goes silently."""
        if self.here.pop(worker.key, None) is None:
            return
        self.cluster.log(f"{worker.key} leaves generation {self.plan.generation}: {why}")
        worker.group, worker.phase = None, "idle"
        worker.idle_since_s = self.cluster.clock.now
        if self.broken_s is None and self.formed:
            self.broken_s = self.cluster.clock.now
        self._warned.discard(worker.key)
        if silent or len(self._warned) == len(self.here):
            return
        for other in list(self.here.values()):
            if other.key in self._warned or not self.cluster.linked(worker.node, other.node):
                continue
            self._warned.add(other.key)
            bound_s = _CLOSED_S if self.formed_here(other) else _INIT_S
            delay_s = self.cluster.choose.uniform(0.001, bound_s)
            self.cluster.clock.after(delay_s, lambda w=other: self._notice(w))  # type: ignore[misc]

    def _notice(self, worker: Worker) -> None:
        """A peer's connection was closed."""
        self._warned.discard(worker.key)
        if worker.group is self and not worker.stopped:
            self.leave(worker, "connection closed")
            worker.broke(self.plan.generation, "connection closed")

    @property
    def whole(self) -> bool:
        """Every member is here, runs, and reaches every other."""
        workers = list(self.here.values())
        return (
            len(workers) == self.plan.world_size
            and all(w.alive and not w.stopped for w in workers)
            and self.cluster.together([w.node for w in workers])
        )

    # --- what comes next ---------------------------------------------------------------------------

    def go_on(self) -> None:
        """Something has changed: take the next step, if it is possible."""
        if len(self.here) < self.plan.world_size:
            return
        choose, clock = self.cluster.choose, self.cluster.clock
        if len(self.formed) < self.plan.world_size:
            if not self._forming and not self.formed and self.whole:
                self._forming = True
                clock.after(choose.uniform(0.02, 0.3), self._form)
        elif not self.covered:
            if not self._iterating and self.whole:
                self._iterating = True
                clock.after(choose.uniform(0.01, 0.1), self._commit_first)
        elif endings.is_due(self):
            if not self._iterating and self._marked and self.whole:
                self._iterating = True
                clock.after(choose.uniform(0.01, 0.1), self._conclude)
        elif self.plan.hold:
            self._hold()
        elif not self._iterating and self._marked and self.whole:
            self._iterating = True
            clock.after(self.cluster.scenario.iteration_s * choose.uniform(0.8, 1.2), self._iterate)

    @property
    def _marked(self) -> bool:
        return all(w.marked == self.plan.generation for w in self.here.values())

    @property
    def _superseded(self) -> bool:
        newest = self.plan.generation
        return all(w.plan is not None and w.plan.generation > newest for w in self.here.values())

    def _form(self) -> None:
        self._forming = False
        if not self.whole or self.formed:
            return
        members = [self.here[m.key] for m in self.plan.members]
        try:
            decision = decide_source(self.plan, [w.whereabouts() for w in members])
        except TrainerError as error:
            raise Violation("source", str(error)) from error
        checks = self.cluster.checks
        checks.source_decided(self.plan, members, decision)
        state = self._settle(members, decision)
        checks.forms(self.plan, members, state)
        for worker in members:
            if worker.key in self.cluster.dies_in_forming:
                self.cluster.dies_in_forming.discard(worker.key)
                moment_s = self.cluster.choose.uniform(0.0, 0.05)
                self.cluster.clock.after(
                    moment_s,
                    lambda w=worker: self.cluster.end(w, "killed while it forms"),  # type: ignore[misc]
                )
            delay_s = self.cluster.choose.uniform(0.0, 0.05)
            self.cluster.clock.after(
                delay_s,
                lambda w=worker: self._formed(w, state),  # type: ignore[misc]
            )

    def _settle(self, members: Sequence[Worker], decision: Decision) -> Snapshot:
        """The state that all begin with."""
        source = members[decision.source]
        if decision.mode == "fresh":
            return Snapshot(0, 0, self.plan.generation)
        if decision.mode == "restore":
            found = self.cluster.readable(source.node)
            if found is None:
                raise Violation("source", f"{source.key} restores, but reads no checkpoint")
            self.cluster.checks.restored(self.plan, found)
            return Snapshot(found.state.iteration, found.state.digest, self.plan.generation)
        return source.held if decision.mode == "apply_held" and source.held else source.state

    def _formed(self, worker: Worker, state: Snapshot) -> None:
        if worker.group is not self or not worker.alive or worker.stopped:
            return
        self.progress_s = self.cluster.clock.now
        worker.commit(state, stop=worker.held == state and worker.held_stop)
        worker.last_formed, worker.formed_iteration = self.plan.generation, state.iteration
        self.formed.add(worker.key)
        self.cluster.log(f"{worker.key} has formed generation {self.plan.generation} at {state}")
        worker.say(ev.WorkerFormed(worker.key, self.plan.generation, "hash", state.iteration))
        self.go_on()

    # --- training ----------------------------------------------------------------------------------

    def _commit_first(self) -> None:
        """Rank 0 commits the state under this generation's number before anything is trained."""
        self._iterating = False
        if self.covered:
            self.go_on()
        elif self.whole:
            self.cluster.checkpoints.save(self.rank0, self, self._is_covered)

    def _is_covered(self, saved: bool) -> None:
        if saved:
            self.covered = True
            self.progress_s = self.cluster.clock.now
            self.go_on()
        else:
            self.cluster.clock.after(0.5, self.go_on)

    def _conclude(self) -> None:
        """The last thing that all members do together."""
        self._iterating = False
        if self.whole and endings.is_due(self):
            self.progress_s = self.cluster.clock.now
            endings.conclude(self)

    def _hold(self) -> None:
        saves, leaves = not self._saved_hold and self._marked, self._superseded
        stopping = [w for w in self.here.values() if w.stop_asked] if self._saved_hold else []
        if not (saves or leaves or stopping) or not self.whole:
            return
        if saves:
            self._saved_hold = True
            self.cluster.checkpoints.save(self.rank0, self, lambda saved: self.go_on())
        for worker in stopping:  # all are at the same safe point: nothing is to be agreed on
            endings.leave_agreed(self, worker, "stopped")
        if leaves and not stopping:
            self._leave_together()

    def _iterate(self) -> None:
        """The end of an iteration: all or, where somebody dies in it, some have its result."""
        self._iterating = False
        if not self.whole:
            return
        members = [self.here[m.key] for m in self.plan.members]
        before = members[0].state
        rolls = tuple((w.key.slot, w.key.incarnation, w.node.index) for w in members)
        digest = hash((before.digest, before.iteration, rolls))
        result = Snapshot(before.iteration + 1, digest, before.branch)
        if result.iteration == self.cluster.scenario.failing_iteration:
            self._iterating = True  # until it breaks
            endings.raise_error(self, result.iteration)
            return
        stop = any(w.stop_asked for w in members)
        self.progress_s = self.last_iteration_s = self.cluster.clock.now
        victim = next((w for w in members if w.key in self.cluster.dies_in_commit), None)
        if victim is not None:
            self._die_in_commit(members, victim, result, stop)
            return
        for worker in members:
            worker.commit(result, stop=stop)
            worker.say_committed()
        self._committed(members[0], result)
        self.cluster.witness(members)
        every = self.cluster.scenario.checkpoint_every
        if result.iteration % every == 0:
            self.cluster.checkpoints.save(members[0], self, lambda saved: None)
        if self._superseded and not stop:
            self._leave_together()
        else:
            self.go_on()

    def _die_in_commit(
        self, members: Sequence[Worker], victim: Worker, result: Snapshot, stop: bool
    ) -> None:
        """One dies between the last collective and the barrier after it, or in that."""
        choose = self.cluster.choose
        self.cluster.dies_in_commit.discard(victim.key)
        all_prepared = choose.random() < 0.6
        for worker in members:
            if all_prepared or choose.random() < 0.5:
                worker.held, worker.held_stop = result, stop
            if all_prepared and choose.random() < 0.4:
                worker.commit(result, stop=stop)
                worker.say_committed()
                self._committed(worker, result)
        self.cluster.log(f"{victim.key} dies in the commit of {result}")
        self.cluster.end(victim, "killed in the commit")

    def _committed(self, worker: Worker, state: Snapshot) -> None:
        self.cluster.checks.committed(self.plan, worker, state)

    def _leave_together(self) -> None:
        """All have seen a newer plan at this safe point."""
        members = list(self.here.values())
        self.here.clear()
        for worker in members:
            worker.group, worker.phase = None, "idle"
        for worker in members:
            worker.enter()

    @property
    def rank0(self) -> Worker:
        """The member that writes checkpoints."""
        return self.here[self.plan.rank0.key]

    # --- hangs -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """What the hang watches of the nodes do: nothing has moved for too long."""
        cluster = self.cluster
        if not self.here and cluster.newest_generation > self.plan.generation:
            return
        cluster.clock.after(HANG_S / 4, self._watch)
        silent_s = cluster.clock.now - self.progress_s
        waits = self.whole and len(self.formed) == self.plan.world_size and not self._iterating
        if silent_s < HANG_S or waits or not self.here:
            return
        hung = [w for w in self.here.values() if w.stopped]
        for worker in hung:
            node = worker.node
            if node.up and node.state.slots[worker.key.slot].trains:
                node.decide(ev.WorkerHung(worker.key, "stopped"))
        if hung:
            return
        text = f"nothing moves for {silent_s:.1f} s"
        for node in dict.fromkeys(w.node for w in self.here.values()):
            node.decide(ev.GenerationStuck(self.plan.generation, text))
