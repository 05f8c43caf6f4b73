"""The supervisor: composes the decisions of the node and of the leader with everything that acts.

One queue holds all events. The machine that an event concerns decides, and its orders are carried
out in order before the next event is taken; what they bring about comes back as events.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rallypoint.daemon.core import holding, leader, node, permission
from rallypoint.daemon.core.ending import EXIT_NOTICE
from rallypoint.daemon.core.events import (
    AdoptedWorker,
    CollectivesEnded,
    JobSeen,
    LeaderEvent,
    LeaseKept,
    NodeEvent,
    NodeStarted,
    PlanSeen,
    StoreReturned,
    WorkerBroke,
    WorkerCommitted,
)
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.errors import StoreError
from rallypoint.daemon.executors import adoption, logs, persist, policies, processes, status
from rallypoint.daemon.executors.addresses import require_addresses
from rallypoint.daemon.executors.admin import AdminServer
from rallypoint.daemon.executors.books import BooksFile
from rallypoint.daemon.executors.checkpointplace import log_survey, require_checkpoint_place
from rallypoint.daemon.executors.drawing import Drawing
from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.executors.hangwatch import HangWatch
from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.executors.monitoring import Facts, Monitoring
from rallypoint.daemon.executors.openstore import open_membership
from rallypoint.daemon.executors.perform import Machine, Performer
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.executors.requests import Requests
from rallypoint.daemon.executors.servicemanager import ServiceManager
from rallypoint.daemon.executors.tasks import Tasks
from rallypoint.daemon.executors.workers import Workers
from rallypoint.daemon.notices.watching import NoticeWatch, watchers_of
from rallypoint.daemon.shared import configload, messages, timeouts
from rallypoint.daemon.shared.common import common, differences_in_words, with_common
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.rundir import RunDir

_log = structlog.get_logger(__name__)

WorkerCommand = Callable[[WorkerKey], Sequence[str]]


@dataclass(frozen=True)
class Outcome:
    """How the supervisor ended."""

    code: int
    reason: str


class Supervisor:
    """One life of the supervisor of one node.

    The caller holds the lock of ``rundir``. Making it touches nothing but ``state.json`` and the
    monitoring port, so that everything that can be refused is refused before a worker starts.
    ``worker_command`` replaces the program of the workers in tests.
    Raises `ConfigError` for what cannot be used as it stands.
    """

    _finished: asyncio.Future[Outcome]
    _detached = False
    _notices: NoticeWatch

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        *,
        fresh: bool = False,
        worker_command: WorkerCommand | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.config, self.rundir = config, rundir
        versions = policies.installed_versions()
        require_addresses(config.node)
        self._place = require_checkpoint_place(rundir, config)
        self._drawing = Drawing(config, rundir)
        self._state = persist.open_state(rundir, config, versions, self._place, fresh=fresh)
        self._monitoring = Monitoring(config, self._facts, lambda: self.recorder.tick())
        metrics = self._monitoring.metrics
        journal = Journal(rundir.journal, self._drawing.follow)
        self.recorder = Recorder(journal, metrics, config, BooksFile(rundir.books))
        self._queue: asyncio.Queue[tuple[Machine, NodeEvent | LeaderEvent]] = asyncio.Queue()
        self._tasks = Tasks(self._fail)
        self.spawn = self._tasks.spawn
        self._job = persist.first_job(self._state.state, config, versions)
        self.recorder.iteration, self.recorder.env_steps = self._job.iteration, self._job.env_steps
        self._node = node.initial(policies.node_policy(config, self._state.state, versions))
        self._leader = leader.initial(policies.leader_policy(config))
        self._values = common(config)
        self._membership = open_membership(
            config, self._state.state, versions, self._emit, metrics.etcd_request, fresh=fresh
        )
        self._workers = Workers(
            rundir,
            self._state,
            self.recorder,
            command=worker_command or processes.worker_command(rundir),
            environment=processes.worker_environment(environ, config.node.interface),
            section=config.log,
            config_hash=configload.config_hash(config),
            welcome=self._welcome,
            answer_commit=self._answer_commit,
            emit=self._emit,
        )
        self._requests = Requests(config, self._membership, metrics, self._emit, self._finish, self)
        self._admin = AdminServer(rundir.admin_socket, self._requests)
        self._performer = Performer(
            node_name=config.node.name,
            workers=self._workers,
            membership=self._membership,
            recorder=self.recorder,
            state=self._state,
            failpoints=Failpoints.from_environment(),
            emit=lambda machine, event: self._queue.put_nowait((machine, event)),
            finish=self._finish,
            spawn=self.spawn,
        )
        self._begun = False
        self._forks = config.node.fork_server and worker_command is None

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Supervise until the job is finished, stopped, drained or failed."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        self._manager = ServiceManager(os.environ)
        loop.set_exception_handler(self._on_loop_error)
        for number in self._requests.signals:
            loop.add_signal_handler(number, self._requests.on_signal, number)
        outcome = Outcome(1, "the supervisor failed")
        try:
            if persist.is_finished(self._job, self.config):
                self._finish(0, persist.FINISHED)
            else:
                await self._start()
            outcome = await self._finished
        finally:
            await self._close(outcome)
        return outcome

    async def _start(self) -> None:
        found = await asyncio.to_thread(
            adoption.take_over, self.rundir, self._state.state, self.config
        )
        for process in found.ended:
            _log.warning("earlier_worker_ended", worker=process.key, pid=process.pid)
        write_atomically(self.rundir.config, configload.to_json(self.config))
        self._drawing.start(self._job.uid)
        self._monitoring.start()
        if self._forks:
            self._workers.processes.use_fork_server()
        await self._admin.start()
        keep = self._manager.keep(lambda: status.in_short(self.status()), self._requests.needs_time)
        self.spawn(keep, "service manager")
        self._notices = NoticeWatch(
            watchers_of(self.config.preemption),
            self.rundir.notices,
            on_notice=self._requests.request_notice,
            on_hint=self._requests.advise_checkpoint,
            on_false=self._requests.false_notice,
        )
        self.spawn(self._notices.run(), "notices")
        self.spawn(self._join(found.adopted), "join")

    async def _join(self, adopted: tuple[processes.WorkerProcess, ...]) -> None:
        """Enter the store, as soon as it answers, and begin; with adopted workers, as the supervisor
        before would have left it."""
        alone = self.config.membership.backend == "embedded"
        plans = persist.plans_to_go_on_from(self._state.state, alone=alone) if adopted else ()
        if plans:
            self.recorder.adopt(plans[0], plans[-1], self._job, time.monotonic())
            done = (self.recorder.iteration, self.recorder.env_steps)
            self._job = persist.with_progress(self._job, *done)
        self._membership.patience.at_trouble = lambda: self._begin_without_store(adopted, plans)
        await self._membership.join(self._job, plans)
        self._job = self._membership.view.job or self._job
        if not self._begun:
            if persist.is_finished(self._job, self.config):
                self._finish(0, persist.FINISHED)
                return
            await self._begin(adopted)
        self.spawn(self._membership.follow(), "watch")
        self.spawn(self._membership.relist(), "re-list")
        self.spawn(self._membership.keep_lease(), "lease")
        self.spawn(self._membership.tend(), "own keys")

    async def _begin_without_store(
        self, adopted: tuple[processes.WorkerProcess, ...], plans: tuple[Plan, ...]
    ) -> None:
        """Go on without a lease, unless a newer plan may be out than the one in which workers train."""
        if self._begun or not plans or not persist.trains_in_newest_plan(self._state.state):
            return
        self._node = node.without_lease(self._node)
        if self._membership.view.job is None:  # else the store has said this much
            self._membership.view.plan = plans[0]  # who else takes part
            self._emit(PlanSeen(plans[0]))
            self._emit(JobSeen(self._job))
        await self._begin(adopted)

    async def _begin(self, adopted: tuple[processes.WorkerProcess, ...]) -> None:
        """Start to supervise, from the plans and the job that were seen."""
        self._begun = True
        self._node = node.of_job(self._node, self._job.uid, self._membership.neighbours.port)
        self._workers.adopt(adopted)
        self._emit(NodeStarted(tuple(AdoptedWorker(p.key, p.pid) for p in adopted)))
        await self._workers.control.start()
        self.spawn(self._hang_watch().run(), "hang watch")
        self.spawn(self._workers.processes.bound_logs(), "worker output")
        self.spawn(self._requests.stop_when_all_drain(), "last node")
        self.spawn(self._decide(), "decisions")
        log_survey(self._place)
        _log.info(
            "supervisor_started",
            pid=os.getpid(),
            dir=str(self.rundir.path),
            metrics_url=self._monitoring.url,
        )

    async def _close(self, outcome: Outcome) -> None:
        """End what still runs, settle the books, and say good-bye."""
        self._manager.ending(outcome.reason)
        self._tasks.cancel()
        self._performer.close()
        if not self._detached:
            await self._workers.processes.end_all()
        self.recorder.close()
        await self._drawing.end(hurry=outcome.code == EXIT_NOTICE)
        try:
            self._job = await self._membership.read_job() or self._job
        except StoreError as error:
            _log.warning("job_not_read", reason=f"{error}; the newest one seen is kept")
        done = (self.recorder.iteration, self.recorder.env_steps)
        self._remember(job=persist.with_progress(self._job, *done))
        await self._workers.control.close()
        if not self._detached:  # else its record stays, as after a crash
            await self._membership.leave()
        if outcome.code == EXIT_NOTICE:
            await self._notices.left()
        await self._admin.close(outcome.code, outcome.reason)
        self._monitoring.close()
        _log.info("supervisor_ended", code=outcome.code, reason=outcome.reason)

    # --- decisions ------------------------------------------------------------------------------

    def _emit(self, event: NodeEvent | LeaderEvent) -> None:
        machine: Machine = "node" if isinstance(event, NodeEvent) else "leader"
        self._queue.put_nowait((machine, event))

    async def _decide(self) -> None:
        while True:
            machine, event = await self._queue.get()
            now = time.monotonic()
            if machine == "node":
                await self._decide_node(event, now)  # type: ignore[arg-type]
            else:
                await self._decide_leader(event, now)  # type: ignore[arg-type]

    async def _decide_node(self, event: NodeEvent, now: float) -> None:
        if isinstance(event, PlanSeen):
            # Before any worker of this node can be in it: the next supervisor goes on from here.
            self._remember(**persist.with_plan(self._state.state, event.plan))
            self.recorder.plan_seen(event.plan, now)
        elif isinstance(event, JobSeen):
            self._job = event.job
            self.recorder.job_seen(event.job)
            self._remember(job=event.job)  # before any worker knows the mark
            self._lead_by(event.job)
        elif isinstance(event, LeaseKept):
            self._monitoring.lease_renewed(self._node, now)
            if self._node.past_lease(now):
                self._emit(StoreReturned())
        elif isinstance(event, WorkerBroke):
            self.spawn(self._membership.doubt_leader(), "leader probe")
        elif isinstance(event, WorkerCommitted):
            self._emit(CollectivesEnded(event.generation))
        self._node, actions = node.decide(self._node, event, now)
        for action in actions:
            _log.debug("order", machine="node", order=repr(action)[:500])
            await self._performer.node(action)
        self.recorder.worker_states([self._node.shown(slot) for slot in self._node.slots])

    def _lead_by(self, job: JobRecord) -> None:
        """Whoever leads, the values in the job's record hold, not those of the leader's own file."""
        if job.values == self._values:
            return
        differs = differences_in_words(self._values, job.values)
        _log.warning("job_values_changed", reason=f"another node began the job anew: {differs}")
        self._values = job.values
        policy = policies.leader_policy(with_common(self.config, job.values))
        self._leader = replace(self._leader, policy=policy)

    async def _decide_leader(self, event: LeaderEvent, now: float) -> None:
        self._leader, actions = leader.decide(self._leader, event, now)
        for action in actions:
            _log.debug("order", machine="leader", order=repr(action)[:500])
            await self._performer.leader(action)

    # --- what others ask ---------------------------------------------------------------------------

    @property
    def node_state(self) -> NodeState:
        """This node as its decisions know it."""
        return self._node

    def status(self) -> dict[str, Any]:
        """The document of ``rallypoint status --json``."""
        lease = holding.lease_trouble(self._node, time.monotonic())
        return status.build(
            config=self.config,
            job=self._job,
            node=self._node,
            recorder=self.recorder,
            others=self._membership.neighbours.records(),
            trouble=self._membership.patience.trouble or lease,
            metrics_url=self._monitoring.url,
            now_unix_s=time.time(),
        )

    def _facts(self) -> Facts:
        leads, trouble = self._leader.job is not None, self._membership.patience.trouble
        return Facts(self.status(), self._node, leads, trouble)

    def _welcome(self, key: WorkerKey) -> messages.Welcome:
        formed, plan = permission.welcome(self._node, key, time.monotonic())
        return messages.Welcome(
            supervisor_incarnation=self._state.state.supervisor_incarnation,
            job_uid=self._job.uid,
            formed=formed,
            plan=plan,
            heard=self.recorder.heard(key),
        )

    def _answer_commit(self, question: messages.AskCommit) -> messages.CommitAnswer:
        return permission.answer_commit(self._node, question, time.monotonic())

    def _remember(self, **changes: Any) -> None:
        try:
            self._state.update(durable=False, **changes)
        except OSError as error:
            _log.error("state_write_failed", path=str(self._state.path), reason=error.strerror)

    def detach(self) -> None:
        """End, and leave the workers to the next supervisor of this directory."""
        self._detached = True
        self._finish(0, "detached: workers train on, for the next supervisor to take over")

    # --- small ----------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str) -> None:
        if not self._finished.done():
            self._finished.set_result(Outcome(code, reason))

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a fault of this program; asyncio would only log it and go on."""
        error = context.get("exception")
        self._fail(error if isinstance(error, BaseException) else RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    def _hang_watch(self) -> HangWatch:
        bound_s = timeouts.derive(self.config, self.config.node.workers).hang_s
        others, pages = self._membership.neighbours, self._workers.readings
        return HangWatch(bound_s, pages, lambda: self._node, others, self._emit)

    def log_facts(self, worker: WorkerKey | None) -> dict[str, Any]:
        """What every log line carries, also that about a worker."""
        incarnation = self._state.state.supervisor_incarnation
        return logs.facts(self.config, incarnation, self.recorder.formed_plan, worker)
