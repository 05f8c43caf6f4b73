"""A model of workers: who forms, trains, breaks and leaves, without any of the work."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey

MESSAGES_PENDING = 3
"""Training goes no faster than its reports are read."""
JOB = JobRecord(uid="job", config_hash="hash", versions={})


@dataclass
class FakeWorker:
    """What a real worker would know and do, without the work."""

    key: WorkerKey
    alive: bool = True
    phase: str = "booting"
    """booting, connected, idle, forming, training."""
    generation: int = 0
    tried: int = 0
    last_formed: int = 0
    committed: int = 0
    plan: Plan | None = None
    formed_seen: int = 0
    stop: bool = False
    leave: str = ""
    entered: bool = False
    """It has committed an iteration in its generation."""
    frozen: bool = False
    """Stopped: it does nothing and answers no probe."""
    line: deque[ev.NodeEvent] = field(default_factory=deque)


class WorkerModel:
    """All workers of a job, and what any of them or a whole generation can do next."""

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, FakeWorker] = {}
        self.plans: dict[int, Plan] = {}
        self.job = JOB
        self.checkpoint: tuple[int, int] | None = None
        self.committed: dict[int, int] = {}
        """Iteration -> generation that committed it first."""

    def moves(self) -> list[Callable[[], None]]:
        """Everything that some worker, or a whole generation, can do next."""
        awake = [w for w in self.live() if not w.frozen]
        single = [move for w in awake if (move := self._move(w)) is not None]
        return single + self._group_moves()

    def kill(self, worker: FakeWorker) -> None:
        """SIGKILL: what it has said before still arrives."""
        worker.alive = False
        worker.line.append(ev.WorkerExited(worker.key, None, 9, "killed"))

    def freeze(self, worker: FakeWorker) -> None:
        """SIGSTOP: it does nothing and answers nothing."""
        worker.frozen = True

    def thaw(self) -> None:
        """SIGCONT to all."""
        for worker in self.live():
            worker.frozen = False

    def live(self) -> list[FakeWorker]:
        """Workers whose process lives."""
        return [worker for worker in self.workers.values() if worker.alive]

    def take_plan(self, worker: FakeWorker, plan: Plan) -> None:
        if worker.plan is None or plan.generation > worker.plan.generation:
            worker.plan = plan
            if worker.phase == "forming" or (worker.phase == "training" and plan.kind == "forced"):
                worker.phase = "idle"  # superseded, or released

    def _move(self, worker: FakeWorker) -> Callable[[], None] | None:
        """What this worker can do by itself, if anything."""
        plan = worker.plan
        if worker.phase == "booting":
            return lambda: self._say(worker, "connected", ev.WorkerConnected(worker.key))
        if worker.phase == "connected":
            ready = ev.WorkerBecameReady(
                worker.key, "host", 5000 + worker.key.slot, "cpu", 0, 0, self.checkpoint
            )
            return lambda: self._say(worker, "idle", ready)
        waits = worker.phase in ("idle", "forming") or not worker.entered
        if worker.leave and waits:
            return lambda: self._go(worker, worker.leave)
        newer = plan is not None and plan.generation > worker.tried and plan.find(worker.key)
        if worker.phase == "idle" and newer:
            return lambda: self._begin(worker)
        if worker.phase in ("forming", "training") and self._peer_left(worker):
            return lambda: self._break(worker)
        return None

    def _say(self, worker: FakeWorker, phase: str, event: ev.NodeEvent) -> None:
        worker.phase = phase
        worker.line.append(event)

    def _begin(self, worker: FakeWorker) -> None:
        assert worker.plan is not None
        worker.phase, worker.entered = "forming", False
        worker.generation = worker.tried = worker.plan.generation

    def _peer_left(self, worker: FakeWorker) -> bool:
        """A peer that had come is dead or elsewhere. (Who never came is only waited for.)"""
        come = [p for p in self._peers(worker.generation) if p.tried >= worker.generation]
        return any(
            not p.alive or p.generation > worker.generation or p.phase == "idle" for p in come
        )

    def _peers(self, generation: int) -> list[FakeWorker]:
        return [self.workers[m.key] for m in self.plans[generation].members]

    def _break(self, worker: FakeWorker) -> None:
        generation = worker.generation
        worker.phase = "idle"
        plan = worker.plan
        if plan is None or plan.generation == generation or plan.kind == "planned":
            worker.line.append(ev.WorkerBroke(worker.key, generation, "connection closed"))

    def blip(self, worker: FakeWorker) -> None:
        """A collective fails though everybody lives."""
        if not worker.frozen and worker.phase in ("forming", "training"):
            self._break(worker)

    def _go(self, worker: FakeWorker, reason: str) -> None:
        worker.alive = False
        worker.line.append(ev.WorkerLeft(worker.key, worker.committed, reason))
        worker.line.append(ev.WorkerExited(worker.key, 0, None, reason))

    def _group_moves(self) -> list[Callable[[], None]]:
        """What a whole generation can do together."""
        moves: list[Callable[[], None]] = []
        generations = {w.generation for w in self.live() if w.phase in ("forming", "training")}
        for generation in sorted(generations):
            peers = self._peers(generation)
            if not all(
                p.alive
                and not p.frozen
                and p.generation == generation
                and p.phase in ("forming", "training")
                for p in peers
            ):
                continue
            moves += [lambda p=p: self._form(p) for p in peers if p.phase == "forming"]  # type: ignore[misc]
            if all(p.phase == "training" for p in peers):
                self._training_moves(self.plans[generation], peers, moves)
        return moves

    def _form(self, worker: FakeWorker) -> None:
        worker.phase = "training"
        restored = (self.checkpoint or (0, 0))[1] if self.plans[worker.generation].restore else 0
        worker.committed = max([p.committed for p in self._peers(worker.generation)] + [restored])
        worker.last_formed = worker.generation
        worker.line.append(ev.WorkerFormed(worker.key, worker.generation, "hash", worker.committed))

    def _training_moves(
        self, plan: Plan, group: list[FakeWorker], moves: list[Callable[[], None]]
    ) -> None:
        generation = plan.generation
        marked = all(p.formed_seen >= generation for p in group)
        covered = not plan.commit_first or (
            self.checkpoint is not None and self.checkpoint[0] >= self.job.restore_generation
        )
        newest = min(0 if p.plan is None else p.plan.generation for p in group)
        if marked and (self.checkpoint or (0, 0))[0] < generation:
            moves.append(lambda: self._save(group[0]))
        if plan.hold:
            if newest > generation:
                moves.append(lambda: self._leave_generation(group))
            elif any(p.stop for p in group):
                moves.append(lambda: self._stop(group))
        elif marked and covered and not any(self._holds_up(p) for p in group):
            moves.append(lambda: self._commit(group, newest))

    def _holds_up(self, worker: FakeWorker) -> bool:
        """It was told to leave before its first iteration here, or its reports are not read yet."""
        return bool(worker.leave and not worker.entered) or len(worker.line) >= MESSAGES_PENDING

    def _save(self, worker: FakeWorker) -> None:
        self.checkpoint = (worker.generation, worker.committed)
        worker.line.append(ev.WorkerCheckpointed(worker.key, worker.generation, worker.committed))

    def _commit(self, group: list[FakeWorker], newest: int) -> None:
        for worker in group:
            worker.committed += 1
            worker.entered = True
            worker.line.append(
                ev.WorkerCommitted(worker.key, worker.generation, worker.committed, 0)
            )
        first = self.committed.setdefault(group[0].committed, group[0].generation)
        assert first <= group[0].generation
        if any(p.stop for p in group):
            self._stop(group)
        elif newest > group[0].generation:
            self._leave_generation(group)

    def _leave_generation(self, group: list[FakeWorker]) -> None:
        for worker in group:
            worker.phase = "idle"

    def _stop(self, group: list[FakeWorker]) -> None:
        for worker in group:
            self._go(worker, "stopped")
