"""The workers of this node as the supervisor handles them: start, end, and what they say.

Joins the process executor, the slots' counter pages and the control socket, and turns what happens
there into events of the node.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from rallypoint.daemon.core import events
from rallypoint.daemon.core.events import NodeEvent
from rallypoint.daemon.executors import evidence
from rallypoint.daemon.executors.control import ControlServer
from rallypoint.daemon.executors.persist import StateFile
from rallypoint.daemon.executors.processes import ProcessExecutor, ProcessExit, WorkerProcess
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import LogSection
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.exitcodes import EXIT_RESTART_COLD
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotCounters, SlotPage

LAST_WORDS_S: Final = 0.2
"""How long the end of a process waits for what it sent before it died to be read."""

_OF_A_GENERATION: Final = (
    messages.Formed,
    messages.Stepped,
    messages.EnvsHeld,
    messages.Broken,
    messages.Committed,
    messages.HashMismatch,
    messages.CheckpointDone,
)

_log = structlog.get_logger(__name__)


class Workers:
    """``emit`` takes events of the node; ``answer_commit`` answers commit questions; ``welcome``
    makes the answer to an accepted worker's Hello."""

    def __init__(
        self,
        rundir: RunDir,
        state: StateFile,
        recorder: Recorder,
        *,
        command: Callable[[WorkerKey], Sequence[str]],
        environment: Mapping[str, str],
        section: LogSection,
        config_hash: str,
        welcome: Callable[[WorkerKey], messages.Welcome],
        answer_commit: Callable[[messages.AskCommit], messages.CommitAnswer],
        emit: Callable[[NodeEvent], None],
    ) -> None:
        self.processes = ProcessExecutor(
            rundir,
            command,
            environment,
            section=section,
            on_exit=self._ended,
            on_forked=self._started,
            on_failed=self._not_started,
        )
        self.control = ControlServer(rundir.control_socket, self)
        self._rundir = rundir
        self._state = state
        self._recorder = recorder
        self._config_hash = config_hash
        self._welcome = welcome
        self._answer_commit = answer_commit
        self._emit = emit
        self._pages: dict[WorkerKey, SlotPage] = {}
        recorder.ledgers = lambda: {key: page.read_ledger() for key, page in self._pages.items()}
        self._left: set[WorkerKey] = set()
        self._killed: dict[WorkerKey, tuple[str, str]] = {}
        """Whom the supervisor killed: the reason in words, and as it is counted."""
        self._ended_how: dict[int, str] = {}
        """How the last life of each slot ended, until it is started again."""

    # --- orders ---------------------------------------------------------------------------------

    def start(self, key: WorkerKey) -> None:
        """Start the worker of a slot; says `WorkerSpawned` or `SpawnFailed`."""
        incarnations = {**self._state.state.slot_incarnations, key.slot: key.incarnation}
        try:
            # Not durable: a power cut ends the workers as well.
            self._state.update(durable=False, slot_incarnations=incarnations)
            self._pages[key] = SlotPage(self._rundir.page(key.slot), create=True)
            process = self.processes.start(key)
        except OSError as error:
            self._not_started(key, error)
            return
        if process is not None:
            self._started(process)

    def _started(self, process: WorkerProcess) -> None:
        key = process.key
        reason = self._ended_how.pop(key.slot, None)
        if reason is not None:
            self._recorder.worker_restarted(reason)
        _log.info("worker_started", worker=key, pid=process.pid)
        self._emit(events.WorkerSpawned(key, process.pid))

    def _not_started(self, key: WorkerKey, error: OSError) -> None:
        self._ended_how[key.slot] = "spawn_failed"
        _log.error("worker_not_started", worker=key, error=str(error))
        page = self._pages.pop(key, None)
        if page is not None:
            self._recorder.worker_ended(key, 0, page.read_ledger(), by_agreement=False)
            page.close()
        self._emit(events.SpawnFailed(key, str(error)))

    async def kill_hung(self, key: WorkerKey, reason: str) -> None:
        """Save evidence of this worker and of its peers, then end it."""
        try:
            folder = await evidence.save(self._rundir, key, reason, self._suspects())
            _log.warning("evidence_saved", worker=key, reason=reason, path=str(folder))
        except OSError as error:
            _log.error("evidence_not_saved", worker=key, error=str(error))
        if not self.is_gone(key):
            self.kill(key, reason, "hang")

    def kill(self, key: WorkerKey, reason: str, why: str = "order") -> None:
        """SIGKILL to the worker's process group; its end is reported as any other."""
        if key not in self._killed:  # the first reason is the cause
            self._killed[key] = reason, "killed" if why == "order" else why
            _log.warning("worker_killed", worker=key, reason=reason)
        if why == "protocol":
            self.control.drop(key, reason)
        self.processes.kill(key)

    def adopt(self, processes: Sequence[WorkerProcess]) -> None:
        """Take over workers of an earlier supervisor, dead ones included."""
        for process in processes:
            key = process.key
            self._pages[key] = SlotPage(self._rundir.page(key.slot))
            _log.info("worker_adopted", worker=key, pid=process.pid)
        self.processes.adopt(processes)

    def readings(self) -> dict[WorkerKey, SlotCounters]:
        """The pages of all workers that have not been reported gone."""
        return {key: page.read() for key, page in self._pages.items()}

    def _suspects(self) -> dict[WorkerKey, evidence.Suspect]:
        return {
            key: evidence.Suspect(key, process.pid, counters)
            for key, counters in self.readings().items()
            if (process := self.processes.process(key)) is not None
        }

    def is_gone(self, key: WorkerKey) -> bool:
        """Whether the process table of this node knows that the worker has ended."""
        return self.processes.process(key) is None

    # --- what happens ---------------------------------------------------------------------------

    def hello(self, message: messages.Hello) -> messages.Welcome | messages.Leave:
        """Accept the process that we started for this key, and nobody else."""
        key, process = message.key, self.processes.process(message.key)
        refusal = ""
        if process is None:
            refusal = f"worker {key} is not of this supervisor's life"
        elif (message.pid, message.start_ticks) != (process.pid, process.start_ticks):
            refusal = f"worker {key} has pid {process.pid}, not {message.pid}"
        elif message.config_hash != self._config_hash:
            refusal = (
                f"worker {key} has configuration {message.config_hash}, not {self._config_hash}"
            )
        else:
            refusal = self._plan_mismatch(message)
            if refusal:
                self.kill(key, refusal)
        if refusal:
            _log.warning("worker_refused", worker=key, pid=message.pid, reason=refusal)
            return messages.Leave(reason=refusal)
        self._recorder.greeted(message)
        for event in (events.WorkerConnected(key), *_facts(message)):
            self._emit(event)
        return self._welcome(key)

    def _plan_mismatch(self, message: messages.Hello) -> str:
        """Why this worker cannot be in the generation that it says it formed; "" when it can."""
        formed, plans = message.formed, self._state.state.plans
        if formed is None:
            return ""
        text = f"worker {message.key} formed generation {formed.generation}"
        newest = plans[-1].generation if plans else 0
        if formed.generation > newest:
            return f"{text}, but {newest} is the newest that was published"
        plan = next((p for p in plans if p.generation == formed.generation), None)
        if plan is not None and plan.find(message.key) is None:
            return f"{text}, whose plan does not list it"
        return ""

    def misbehaved(self, key: WorkerKey, reason: str) -> None:
        """An accepted worker sent what is no message, or one that may not stand there."""
        self._emit(events.WorkerMisbehaved(key, reason))

    def take(self, message: messages.WorkerMessage) -> None:
        """A message of an accepted worker. Raises `ProtocolError` for one about a generation that was
        never published, before anything is written down of it."""
        newest = self._recorder.newest_generation
        if isinstance(message, _OF_A_GENERATION) and message.generation > newest:
            raise ProtocolError(
                f"{type(message).__name__} of {message.key} is about generation "
                f"{message.generation}, but {newest} is the newest that was published"
            )
        if isinstance(message, messages.AskCommit):
            answer = self._answer_commit(message)
            _log.info(
                "commit_question",
                worker=message.key,
                iteration=message.iteration,
                allowed=answer.allowed,
                reason=answer.reason,
            )
            self.control.send(message.key, answer)
        self._recorder.take(message, time.monotonic(), time.time())
        if isinstance(message, messages.Leaving):
            self._left.add(message.key)
        event = _event_of(message)
        if event is not None:
            self._emit(event)

    def _ended(self, ended: ProcessExit) -> None:
        """The process is gone: what it sent before comes first, then its end."""
        key = ended.process.key
        noticed_s = time.monotonic()
        self.control.when_closed(key, LAST_WORDS_S, lambda: self._say_ended(ended, noticed_s))

    def _say_ended(self, ended: ProcessExit, noticed_s: float) -> None:
        key = ended.process.key
        fault = self._recorder.faults.get(key)
        by_agreement = key in self._left and ended.code in (0, None) and ended.signal is None
        killed, counted = self._killed.pop(key, (None, None))
        self._left.discard(key)
        reason = ended.how
        if killed is not None:
            reason = f"{ended.how} by the supervisor: {killed}"
        elif fault is not None:
            reason = f"{ended.how}: {fault.fingerprint}"
        if not by_agreement:
            self._ended_how[key.slot] = counted or _restart_reason(ended, fault)
        page = self._pages.pop(key)
        counters, ledger = page.read(), page.read_ledger()
        page.close()
        log = _log.info if by_agreement else _log.warning
        log(
            "worker_exited",
            worker=key,
            pid=ended.process.pid,
            reason=reason,
            phase=counters.phase,
            output_tail=() if by_agreement else ended.tail,
        )
        collected = counters.collected_env_steps
        self._recorder.worker_ended(key, collected, ledger, by_agreement=by_agreement)
        if not by_agreement:
            self._recorder.loss_noticed(key, noticed_s, time.monotonic())
        self._emit(events.WorkerExited(key, ended.code, ended.signal, reason))


def _facts(message: messages.Hello) -> list[NodeEvent]:
    """What a worker that has been heard by an earlier supervisor says of itself."""
    if message.ready is None:
        return []
    formed = 0 if message.formed is None else message.formed.generation
    ready = msgspec.structs.replace(
        message.ready, last_formed=max(message.ready.last_formed, formed)
    )
    said = [ready, message.formed, message.checkpoint, message.committed]
    found = [_event_of(m) for m in said if m is not None]
    if message.broken_generation:
        text = "reported to an earlier supervisor"
        found.append(events.WorkerBroke(message.key, message.broken_generation, text))
    return [event for event in found if event is not None]


def _restart_reason(ended: ProcessExit, fault: messages.Fault | None) -> str:
    if ended.code == EXIT_RESTART_COLD:
        return "cold"
    if fault is not None:
        return "fault"
    if ended.code is None and ended.signal is None:
        return "unknown"
    return "signal" if ended.signal is not None else "error"


def _event_of(message: messages.WorkerMessage) -> NodeEvent | None:
    match message:
        case messages.Ready():
            return events.WorkerBecameReady(
                key=message.key,
                host=message.host,
                port=message.port,
                device=message.device,
                capacity_envs=message.capacity_envs,
                last_formed=message.last_formed,
                checkpoint=message.checkpoint,
            )
        case messages.Broken():
            return events.WorkerBroke(
                message.key, message.generation, message.error, message.capacity_envs
            )
        case messages.Formed():
            return events.WorkerFormed(
                message.key, message.generation, message.state_hash, message.iteration
            )
        case messages.Committed():
            return events.WorkerCommitted(
                message.key, message.generation, message.iteration, message.env_steps_total
            )
        case messages.CheckpointDone():
            return events.WorkerCheckpointed(message.key, message.generation, message.iteration)
        case messages.Fault():
            return events.WorkerFaulted(
                message.key,
                message.generation,
                message.iteration,
                message.fingerprint,
                message.traceback,
            )
        case messages.Leaving():
            return events.WorkerLeft(message.key, message.iteration, message.reason)
        case _:
            return None
