"""A supervisor that does exactly what a test tells it: real workers, no membership logic.

It starts worker processes, speaks the control protocol to them, and records every message.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from rallypoint.daemon.shared import envbudget, messages, unixsocket
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import to_json
from rallypoint.daemon.shared.plan import ChangeKind, Plan, PlannedWorker, WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotCounters, SlotPage
from tests.fakes.forked import ForkedWorker

M = TypeVar("M", bound=messages._Message)


class ScriptedSupervisor:
    """Use as a context manager; ends every worker it started."""

    def __init__(
        self,
        path: Path,
        config: Config,
        *,
        failpoints: str = "",
        worker: str | None = None,
    ) -> None:
        """``worker``: a script to run instead of the worker's own program."""
        self._worker = worker
        self.rundir = RunDir(path)
        self.config = config
        self.log: list[messages.WorkerMessage] = []
        self.processes: dict[WorkerKey, ForkedWorker] = {}
        self.failpoint_log = path / "failpoints.log"
        self.formed = 0
        self.plan: Plan | None = None
        self.allow_commit = True
        self.mark_formed_by_itself = True
        self._changed = threading.Condition()
        self._connections: dict[WorkerKey, socket.socket] = {}
        self._failpoints = failpoints
        path.mkdir(parents=True, exist_ok=True)
        self.rundir.config.write_bytes(to_json(config))
        self._server = unixsocket.listen(self.rundir.control_socket)
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
        self._server.close()
        for connection in list(self._connections.values()):
            connection.close()

    # --- workers ----------------------------------------------------------------------------

    def start(self, slot: int, incarnation: int = 1, *, node: str = "n") -> WorkerKey:
        """Start the worker of a slot; slots of all nodes are numbered together."""
        key = WorkerKey(node, slot, incarnation)
        SlotPage(self.rundir.page(slot), create=True).close()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RALLYPOINT_FAILPOINTS": self._failpoints,
            "RALLYPOINT_FAILPOINT_LOG": str(self.failpoint_log),
        }
        place = ("--dir", str(self.rundir.path), "--node", node)
        self.processes[key] = ForkedWorker(
            (*place, "--slot", str(slot), "--incarnation", str(incarnation)),
            environment,
            self.rundir.path / f"worker-{slot}-{incarnation}.log",
            self._worker,
        )
        return key

    def kill(self, key: WorkerKey) -> None:
        self.processes[key].kill()
        self.processes[key].wait(10)

    def counters(self, slot: int) -> SlotCounters:
        page = SlotPage(self.rundir.page(slot))
        try:
            return page.read()
        finally:
            page.close()

    def poll_page(
        self, slot: int, condition: Callable[[SlotCounters], bool], timeout_s: float = 30.0
    ) -> None:
        """Wait until the page of a slot shows something; pages have no event to wait for."""
        self.poll(
            lambda: condition(self.counters(slot)),
            lambda: f"page says {self.counters(slot)}",
            timeout_s,
        )

    def poll(
        self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = 60.0
    ) -> None:
        """Wait until something holds that has no event to wait for."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what()}\n{self.output()}"
            time.sleep(0.01)

    def vanish(self) -> None:
        """Be gone, as after a SIGKILL: no socket, no connections."""
        self._server.close()
        self.rundir.control_socket.unlink()
        for connection in self._connections.values():
            connection.shutdown(socket.SHUT_RDWR)

    def output(self) -> str:
        """What all workers wrote, for failure messages."""
        files = sorted(self.rundir.path.glob("worker-*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text()[-4000:]}" for f in files)

    # --- orders -----------------------------------------------------------------------------

    def publish(
        self,
        members: Sequence[WorkerKey],
        *,
        kind: ChangeKind = "forced",
        restore: bool = False,
        hold: bool = False,
        commit_first: bool = False,
        survivors: Sequence[WorkerKey] = (),
    ) -> Plan:
        """Publish the next generation with these members in rank order."""
        ready = {m.key: m for m in self.of(messages.Ready)}
        before = {} if self.plan is None else {m.key: m.blocks for m in self.plan.members}
        held = {key: before[key] for key in members if key in before}
        env = self.config.env
        blocks = (
            envbudget.assign_global(
                held, members, env.num_envs // env.block, move=kind == "planned"
            )
            if env.budget == "global"
            else envbudget.assign_per_rank(held, members, env.num_envs // env.block)
        )
        generation = 1 + (self.formed if self.plan is None else self.plan.generation)
        plan = Plan(
            generation=generation,
            kind=kind,
            cause="start",
            formed=self.formed,
            restore=restore,
            hold=hold,
            commit_first=commit_first,
            budget_envs=env.num_envs,
            members=tuple(
                PlannedWorker(key, rank, ready[key].host, ready[key].port, blocks[key])
                for rank, key in enumerate(members)
            ),
            survivors=tuple(survivors),
            lineage=generation if restore or self.plan is None else self.plan.lineage,
            iterations=self.config.job.iterations,
            env_steps=self.config.job.env_steps,
        )
        self.plan = plan
        self.broadcast(messages.PlanPublished(plan=plan))
        return plan

    def mark_formed(self, generation: int) -> None:
        self.formed = generation
        self.broadcast(messages.FormedMark(generation=generation))

    def broadcast(self, message: messages.SupervisorMessage) -> None:
        for key in list(self._connections):
            self.send(key, message)

    def send(self, key: WorkerKey, message: messages.SupervisorMessage) -> None:
        with contextlib.suppress(OSError, KeyError):
            self._connections[key].sendall(messages.encode(message))

    # --- what was said ------------------------------------------------------------------------

    def of(self, kind: type[M], key: WorkerKey | None = None) -> list[M]:
        """All messages of this type so far, of one worker or of all."""
        with self._changed:
            return [m for m in self.log if isinstance(m, kind) and key in (None, m.key)]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60.0, what: str = "") -> None:
        """Wait until the condition holds; fails with everything the workers wrote."""
        with self._changed:
            met = self._changed.wait_for(condition, timeout_s)
        assert met, f"not within {timeout_s} s: {what}\n{self.log[-12:]}\n{self.output()}"

    def wait_ready(self, *keys: WorkerKey) -> None:
        self.wait(
            lambda: all(self.of(messages.Ready, key) for key in keys), what=f"{keys} to be ready"
        )

    def wait_committed(self, iteration: int, *keys: WorkerKey) -> None:
        """Until each of these workers has committed this iteration."""
        self.wait(
            lambda: all(
                any(c.iteration >= iteration for c in self.of(messages.Committed, key))
                for key in keys
            ),
            what=f"{keys} to commit iteration {iteration}",
        )

    # --- the server -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = messages.FrameReader()
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            for body in reader.feed(data):
                self._take(connection, messages.decode_from_worker(body))

    def _take(self, connection: socket.socket, message: messages.WorkerMessage) -> None:
        with self._changed:
            self.log.append(message)
            if isinstance(message, messages.Hello):
                self._connections[message.key] = connection
                welcome = messages.Welcome(
                    supervisor_incarnation=1, job_uid="uid", formed=self.formed, plan=self.plan
                )
                self.send(message.key, welcome)
            elif isinstance(message, messages.AskCommit):
                answer = messages.CommitAnswer(
                    ask=message.ask, allowed=self.allow_commit, reason="told by the test"
                )
                self.send(message.key, answer)
            elif isinstance(message, messages.Formed) and self.mark_formed_by_itself:
                self._maybe_mark()
            self._changed.notify_all()

    def _maybe_mark(self) -> None:
        plan = self.plan
        if plan is None or self.formed >= plan.generation:
            return
        formed = {
            m.key
            for m in self.log
            if isinstance(m, messages.Formed) and m.generation == plan.generation
        }
        if formed >= {m.key for m in plan.members}:
            self.mark_formed(plan.generation)
