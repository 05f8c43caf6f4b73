"""How a generation of the simulation comes to the end of its job: an agreed one, or an error of the
program."""

from typing import TYPE_CHECKING, Final, Literal

from rallypoint.daemon.core import events as ev

if TYPE_CHECKING:
    from rallypoint.ops.simulation.group import Group
    from rallypoint.ops.simulation.worker import Worker

FINGERPRINT: Final = "ZeroDivisionError at step.py:12"
"""Of the error that every worker's program raises where the scenario says so."""
TRACEBACK: Final = f"Traceback (most recent call last):\n  {FINGERPRINT}"


def is_due(group: "Group") -> bool:
    """Whether the members are to conclude: the last iteration is done, or all know that all stop."""
    members, last = group.here.values(), group.plan.iterations
    done = last is not None and all(w.state.iteration >= last for w in members)
    return done or all(w.stop_agreed for w in members)


def conclude(group: "Group") -> None:
    """Rank 0 commits a checkpoint, which may fail; after the last collective all leave, or, where one
    dies in it, some."""

    def leave(saved: bool) -> None:
        if not group.whole:
            return
        last = group.plan.iterations
        members = list(group.here.values())
        finished = last is not None and all(w.state.iteration >= last for w in members)
        victim = next((w for w in members if w.key in group.cluster.dies_in_commit), None)
        if victim is not None:
            group.cluster.dies_in_commit.discard(victim.key)
            members = [
                w for w in members if w is not victim and group.cluster.choose.random() < 0.5
            ]
        for worker in members:
            leave_agreed(group, worker, "finished" if finished else "stopped")
        if victim is not None:
            group.cluster.end(victim, "killed in the last collective of all")

    group.cluster.checkpoints.save(group.rank0, group, leave)


def leave_agreed(group: "Group", worker: "Worker", reason: Literal["finished", "stopped"]) -> None:
    """This member leaves as all have agreed: it says so, and exits."""
    group.cluster.checks.agreed(worker, reason)
    worker.say(ev.WorkerLeft(worker.key, worker.state.iteration, reason))
    group.cluster.end(worker, reason, code=0)


def raise_error(group: "Group", iteration: int) -> None:
    """The program's error, in all members or in some: the others see a closed connection first."""
    choose, members = group.cluster.choose, list(group.here.values())
    together = choose.random() < 0.4
    chosen = [w for w in members if together or choose.random() < 0.5] or members[:1]
    for worker in chosen:
        delay_s = choose.uniform(0.0, 0.02)
        group.cluster.clock.after(delay_s, lambda w=worker: _raise_here(group, w, iteration))  # type: ignore[misc]


def _raise_here(group: "Group", worker: "Worker", iteration: int) -> None:
    if worker.group is group and worker.alive and not worker.stopped:
        worker.say(
            ev.WorkerFaulted(worker.key, group.plan.generation, iteration, FINGERPRINT, TRACEBACK)
        )
        exit_s = group.cluster.choose.uniform(0.05, 0.2)  # others that raise it are not cut short
        group.cluster.clock.after(exit_s, lambda: group.cluster.end(worker, FINGERPRINT, code=1))


def fault(worker: "Worker", iteration: int, fingerprint: str, traceback: str) -> None:
    """An exception of this worker's program: it tells of it, and exits."""
    generation = worker.last_formed if worker.group is not None else 0
    worker.say(ev.WorkerFaulted(worker.key, generation, iteration, fingerprint, traceback))
    worker.cluster.end(worker, fingerprint, code=1)
