"""What is written down about the run: journal, metrics, the two ledgers, log lines.

Nothing here decides anything. It takes the messages of workers and a few facts of the supervisor,
in the order in which they happened.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.executors import shown
from rallypoint.daemon.executors.accounting import (
    Change,
    NewestChanges,
    Rate,
    RecoveryClock,
    Stalls,
    StepLedger,
    rounded,
)
from rallypoint.daemon.executors.books import Books, BooksFile
from rallypoint.daemon.executors.checkpointfacts import Checkpoints
from rallypoint.daemon.executors.journal import Journal, Line
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.executors.wallledger import WallLedger
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import LedgerReading

_log = structlog.get_logger(__name__)


class Recorder:
    """The books of one supervisor; ``status`` shows its public facts."""

    def __init__(
        self, journal: Journal, metrics: Metrics, config: Config, books: BooksFile
    ) -> None:
        self.iteration = 0
        """Newest committed iteration of the present lineage."""
        self.env_steps = 0
        """Env steps that its state has seen."""
        self.figures: dict[str, float] = {}
        """Figures of the newest committed iteration."""
        self.checkpoints = Checkpoints(metrics)
        self.formed_plan: Plan | None = None
        """Plan of the newest formed generation."""
        self.faults: dict[WorkerKey, messages.Fault] = {}
        self.recovery = RecoveryClock(config.node.name)
        self.ledgers: Callable[[], Mapping[WorkerKey, LedgerReading]] = dict
        """Reads the ledgers of all workers that are not reported gone; set by who has their pages."""
        self._wall = WallLedger(config.node.workers, time.monotonic())
        self._journal = journal
        self._metrics = metrics
        self._config = config
        self._books = books
        self._heard: Counter[WorkerKey] = Counter()
        self._steps = StepLedger()
        self._stalls = Stalls()
        self._rate = Rate()
        self._changes = NewestChanges()
        self._progress_s = time.monotonic()
        shown.ages(metrics, self.recovery, self._changes, lambda: self._progress_s)

    # --- from one supervisor to the next --------------------------------------------------------

    def adopt(self, formed: Plan, newest: Plan, job: JobRecord, now: float) -> None:
        """Go on from the books of a supervisor that was killed while generation ``formed`` trained."""
        books = self._books.read() or Books()
        self._heard.update(dict(books.heard))
        self._metrics.restore(books.totals)
        self._steps.resume(books.accounted, books.dead)
        self._wall.resume(books.wall)
        self.figures = books.figures
        self._metrics.set_train_figures(books.figures)
        self.checkpoints.resume(books)
        self.recovery.resume(formed, newest, books.change, now)
        since_bytes = books.journal_bytes or self._journal.size_bytes
        for line in self._journal.resume(job.restore_generation, since_bytes):
            self._count(line)
        self.iteration = max(self.iteration, self._journal.iteration)
        self.env_steps = max(self.env_steps, books.env_steps)
        self._metrics.set("iteration", self.iteration)
        self.formed_plan = formed
        shown.generation(self._metrics, self._config, formed)

    def _count(self, line: Line) -> None:
        """Count what was written to the journal and not yet into the books."""
        if line.event == "generation":
            self._metrics.add("membership_changes_total", cause=line.cause)
        elif line.event == "iteration":
            self._metrics.add("iterations_total")
            self._metrics.add("env_steps_total", self._steps.used(r.record() for r in line.ranks))
            self.env_steps, self.figures = line.env_steps_total, line.metrics

    @property
    def newest_generation(self) -> int:
        """Number of the newest plan that was published; 0 before any."""
        plan = self.recovery.newest_plan
        return 0 if plan is None else plan.generation

    @property
    def takes_part(self) -> bool:
        """Whether a worker of this node is in the newest formed generation, and reports iterations."""
        return self.formed_plan is not None and self.formed_plan.lists(self._config.node.name)

    def heard(self, key: WorkerKey) -> int:
        """How many messages of this worker have been taken."""
        return self._heard[key]

    def greeted(self, message: messages.Hello) -> None:
        """What an adopted worker says of the generation that it is in."""
        if message.formed is not None:
            self.recovery.formed(message.formed)
        if message.stepped is not None:
            self._stepped(message.stepped)

    def tick(self) -> None:
        """Account for the time of all slots up to now."""
        self._wall.tick(time.monotonic(), self.ledgers())
        shown.seconds(self._metrics, *self._wall.take())

    def _save(self) -> None:
        self.tick()
        self._books.write(
            Books(
                heard=tuple(self._heard.items()),
                totals=self._metrics.totals(),
                accounted=self._steps.accounted(),
                dead=self._steps.unsettled(),
                journal_bytes=self._journal.size_bytes,
                env_steps=self.env_steps,
                figures=self.figures,
                checkpoint=self.checkpoints.newest,
                tiers=self.checkpoints.tiers,
                wall=self._wall.books(),
                change=self.recovery.moments(),
            )
        )

    # --- messages of workers ------------------------------------------------------------------

    def take(self, message: messages.WorkerMessage, now: float, now_unix_s: float) -> None:
        """Write down what a worker reports, at monotonic and calendar time."""
        self._take(message, now, now_unix_s)
        self._heard[message.key] += 1
        self._save()

    def _take(self, message: messages.WorkerMessage, now: float, now_unix_s: float) -> None:
        match message:
            case messages.Progress():
                _log.info("worker_progress", worker=message.key, stage=message.stage)
            case messages.Ready():
                where = f"{message.host}:{message.port}"
                _log.info("worker_ready", worker=message.key, store=where)
            case messages.Broken():
                self._broken(message, now)
            case messages.Formed():
                self.recovery.formed(message)
            case messages.Stepped():
                self._stepped(message)
            case messages.EnvsHeld():
                change = self.recovery.envs_held(message)
                if change is not None:
                    self._observe(change, {"envs": change.envs_s})
            case messages.Committed():
                self._committed(message)
            case messages.StepsLost():
                steps = max(0, message.env_steps)
                self._steps.reported_lost(message.key, steps)
                self._metrics.add("env_steps_lost_total", steps, reason=message.reason)
            case messages.HashMismatch():
                self._mismatched(message)
            case messages.CheckpointDone():
                self.checkpoints.done(message, now_unix_s)
            case messages.CheckpointFailed():
                self.checkpoints.failed(message)
            case messages.Restored():
                self.checkpoints.restored(message, now_unix_s)
            case messages.Fault():
                self.faults[message.key] = message
                _log.error(
                    "worker_fault",
                    worker=message.key,
                    iteration=message.iteration,
                    fingerprint=message.fingerprint,
                    traceback=message.traceback,
                )
            case messages.Leaving():
                _log.info("worker_leaving", worker=message.key, reason=message.reason)
            case messages.Hello() | messages.AskCommit():
                pass  # answered by the supervisor, which logs what it answers

    def _stepped(self, message: messages.Stepped) -> None:
        change = self.recovery.stepped(message)
        if change is not None:
            self._completed(change)

    def _broken(self, message: messages.Broken, now: float) -> None:
        self.loss_noticed(message.key, message.at_s, now)
        _log.warning(
            "collective_broken",
            worker=message.key,
            broken_generation=message.generation,
            phase=message.phase,
            error=message.error,
            meaning="collateral: this worker lives, and is no cause of the loss",
        )

    def _mismatched(self, message: messages.HashMismatch) -> None:
        self._metrics.add("state_hash_mismatches_total")
        _log.error(
            "state_hash_mismatch",
            worker=message.key,
            iteration=message.iteration,
            hashes=message.hashes,
        )

    def _committed(self, message: messages.Committed) -> None:
        shown.worker(self._metrics, message)
        stall = self._stalls.take(message, self.formed_plan)
        if stall is not None:
            self._metrics.observe("change_stall_seconds", stall.seconds, cause=stall.cause)
        self._wall.committed(message)
        self._metrics.count_collectives(message.collectives)
        try:
            outcome = self._journal.commit(message)
        except OSError as error:
            outcome = "new"
            _log.error("journal_write_failed", path=str(self._journal.path), error=str(error))
        if outcome == "conflict":
            self._metrics.add("state_hash_mismatches_total")
            _log.error(
                "state_hash_conflict",
                worker=message.key,
                iteration=message.iteration,
                state_hash=message.state_hash,
            )
        elif outcome == "gap":
            _log.error("iteration_gap", before=self.iteration, iteration=message.iteration)
        if outcome not in ("new", "gap"):
            return
        self.iteration = message.iteration
        self.env_steps = message.env_steps_total
        self.figures = message.metrics
        self._progress_s = time.monotonic()
        self._metrics.add("iterations_total")
        self._metrics.add("env_steps_total", self._steps.used(message.ranks))
        self._metrics.set("env_steps_per_second", self._rate.take(message))
        shown.iteration(self._metrics, message)
        if self._config.env.backup == "node" and (cut := self._journal.cut(message)):
            _log.warning("env_rows_lost", iteration=message.iteration, blocks=cut)

    # --- facts of the supervisor -----------------------------------------------------------------

    def worker_states(self, states: list[str]) -> None:
        """States of all slots of this node."""
        shown.worker_states(self._metrics, states)
        self._wall.quarantined([state == "quarantined" for state in states])

    def worker_restarted(self, reason: str) -> None:
        """A slot's worker is started again; ``reason`` says how the life before ended."""
        self._metrics.add("worker_restarts_total", reason=reason)
        self._save()

    def loss_noticed(self, key: WorkerKey, at_s: float, now: float) -> None:
        """A member of the newest plan is gone, or says that one is; ``at_s`` is when that was seen."""
        plan = self.recovery.newest_plan
        if plan is not None and plan.find(key) is not None:
            self.recovery.noticed(at_s, now)
            self._wall.changing()

    def worker_ended(
        self, key: WorkerKey, collected: int, ledger: LedgerReading, *, by_agreement: bool
    ) -> None:
        """A worker's process is gone, or could not be started; ``collected`` env steps and ``ledger`` are
        those of its slot's page."""
        self.tick()
        self._wall.ended(key, time.monotonic(), ledger, by_agreement=by_agreement)
        self.faults.pop(key, None)
        self._heard.pop(key, None)
        shown.worker_gone(self._metrics, key)
        self._steps.died(key, collected, by_agreement=by_agreement)
        self._save()

    def plan_seen(self, plan: Plan, now: float) -> None:
        """A plan is the newest now; reading it again changes nothing."""
        newest = self.recovery.newest_plan
        if newest is not None and newest.generation >= plan.generation:
            return
        self.recovery.published(plan, now)
        self._wall.changing()
        self._save()
        envs = plan.num_envs(self._config.env.block)
        _log.info(
            "generation_published",
            published=plan.generation,
            kind=plan.kind,
            cause=plan.cause,
            members=[str(member.key) for member in plan.members],
            restore=plan.restore,
            hold=plan.hold,
            world_size=plan.world_size,
            num_envs=envs,
            env_steps_per_iteration=envs * self._config.ppo.rollout_steps,
        )

    def job_seen(self, job: JobRecord) -> None:
        """The job's record as the store has it now."""
        self.checkpoints.heard(job.checkpoint)
        self.marked(job.formed)

    def marked(self, generation: int) -> None:
        """``job.formed`` has reached this generation."""
        change = self.recovery.marked(generation)
        if change is None:
            return
        plan, formed = change.plan, next(iter(change.formed.values()), None)
        self.formed_plan = plan
        self.tick()
        self._wall.formed(plan.cause)
        shown.generation(self._metrics, self._config, plan)
        self._settle(plan)
        if formed is None:  # formed in an earlier life, or without any worker of this node
            self._save()
            return
        again = self._journal.knows(generation)
        try:
            kept = self._journal.generation(plan, formed, self._config)
        except OSError as error:
            kept = True
            _log.error("journal_write_failed", path=str(self._journal.path), error=str(error))
        if not kept:
            _log.error("iteration_went_back", before=self.iteration, iteration=formed.iteration)
        self.iteration = self._journal.iteration
        self._metrics.set("iteration", self.iteration)
        if not again:
            self._metrics.add("membership_changes_total", cause=plan.cause)
        seconds = change.seconds()
        self._observe(change, {k: v for k, v in seconds.items() if k not in _LATE_PHASES})
        _log.info(
            "generation_formed",
            formed=generation,
            kind=plan.kind,
            cause=plan.cause,
            iteration=formed.iteration,
            source=str(formed.source),
            rolled_back=formed.rolled_back,
            seconds=rounded(seconds),
        )
        if change.complete:
            self._completed(change)
        self._save()

    def close(self) -> None:
        """The run is over: what dead workers left is lost now."""
        self._settle(None)
        self._save()
        self._journal.close()
        self._books.close()

    def _settle(self, plan: Plan | None) -> None:
        members = [member.key for member in plan.members] if plan is not None else []
        for reason, steps in self._steps.settle(members).items():
            self._metrics.add("env_steps_lost_total", steps, reason=reason)

    def _completed(self, change: Change) -> None:
        seconds = change.seconds()
        try:
            if not self._journal.recovery(change):
                return  # an earlier supervisor has written all of this
        except OSError as error:
            _log.error("journal_write_failed", path=str(self._journal.path), error=str(error))
        self._changes.take(change)
        late = {phase: seconds[phase] for phase in _LATE_PHASES}
        self._observe(change, late | {"envs": change.envs_s})
        _log.info(
            "generation_trains",
            trains=change.plan.generation,
            kind=change.plan.kind,
            cause=change.plan.cause,
            seconds=rounded(seconds),
        )

    def _observe(self, change: Change, seconds: dict[str, float | None]) -> None:
        for phase, value in seconds.items():
            if value is not None:
                self._metrics.observe("recovery_seconds", value, kind=change.plan.kind, phase=phase)


_LATE_PHASES = ("envs", "first_step", "total")
