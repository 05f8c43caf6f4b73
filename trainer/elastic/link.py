"""The worker's end of the control socket: a thread that keeps the connection and the newest orders.

A lost supervisor does not stop training: the link reconnects, keeps what it has to say, and only
after ``orphan_grace_s`` without one says that this worker is an orphan. What had been sent when a
supervisor died may never have been read: the next one says how many messages have been taken, and
the rest is sent again.
"""

import collections
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rallypoint.daemon.shared import messages, unixsocket
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.plan import Plan

_RETRY_S = 0.1
_MAX_UNSENT = 4096
_MAX_SENT = 512
"""Kept to be sent again: more than a socket's buffers hold."""
_HELLO_FACTS = {
    messages.Ready: "ready",
    messages.Formed: "formed",
    messages.Stepped: "stepped",
    messages.Committed: "committed",
    messages.CheckpointDone: "checkpoint",
}


@dataclass
class Orders:
    """What the supervisor has said so far; read and changed under `Link.changed`."""

    job_uid: str = ""
    plan: Plan | None = None
    formed: int = 0
    stop_reason: str | None = None
    leave_reason: str | None = None
    commit_now: int = 0
    """How often a checkpoint was asked for."""
    answers: dict[int, messages.CommitAnswer] = field(default_factory=dict)


class Link:
    """Connection to the supervisor of this node."""

    def __init__(
        self,
        path: Path,
        hello: messages.Hello,
        *,
        orphan_grace_s: float,
        on_plan: Callable[[Plan], None],
        on_abandoned: Callable[[], None],
    ) -> None:
        """``on_plan`` (each newer plan) and ``on_abandoned`` are called by the link's thread; the latter when
        this worker still runs twice ``orphan_grace_s`` after it lost its supervisor."""
        self.changed = threading.Condition()
        self.orders = Orders()
        self._path = path
        self._hello = hello
        self._orphan_grace_s = orphan_grace_s
        self._on_plan = on_plan
        self._on_abandoned = on_abandoned
        self._socket: socket.socket | None = None
        self._unsent: collections.deque[bytes] = collections.deque()
        self._sent: collections.deque[bytes] = collections.deque(maxlen=_MAX_SENT)
        self._sent_count = 0
        self._refused = False
        self._sending = threading.Lock()
        self._lost_at_s = time.monotonic()
        self._next_ask = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="control-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def orphaned(self) -> bool:
        """No supervisor for longer than the grace."""
        return self._socket is None and time.monotonic() - self._lost_at_s > self._orphan_grace_s

    @property
    def _hopeful(self) -> bool:
        """Somebody listens, or may yet."""
        return not (self.orphaned or (self._socket is None and self._refused))

    def send(self, message: messages.WorkerMessage) -> None:
        """Send, or keep until there is a supervisor again. Never blocks on training's behalf."""
        with self._sending:
            self._note(message)
            self._unsent.append(messages.encode(message))
            if len(self._unsent) > _MAX_UNSENT:
                self._unsent.popleft()
            self._flush()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything said so far has been sent. False when the time is over, or when there
        is nobody to hear it."""
        deadline_s = time.monotonic() + timeout_s
        while self._unsent and self._hopeful and time.monotonic() < deadline_s:
            with self._sending:
                self._flush()
            if self._unsent:
                time.sleep(0.01)
        return not self._unsent

    def ask_commit(
        self, ask: Callable[[int], messages.AskCommit], timeout_s: float
    ) -> messages.CommitAnswer | None:
        """Put the question that ``ask`` makes of a fresh number; None when no answer came in time."""
        with self.changed:
            self._next_ask += 1
            number = self._next_ask
        self.send(ask(number))
        with self.changed:
            self.changed.wait_for(lambda: number in self.orders.answers, timeout_s)
            return self.orders.answers.pop(number, None)

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            self._socket.close()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve(self._connect())
            except OSError:
                # No supervisor, or one that is going away: try again until the grace is over.
                time.sleep(_RETRY_S)
            except ProtocolError as error:
                sys.stderr.write(f"{error}; connecting again\n")
                sys.stderr.flush()
                time.sleep(_RETRY_S)
            if time.monotonic() - self._lost_at_s > 2 * self._orphan_grace_s:
                self._on_abandoned()

    def _connect(self) -> socket.socket:
        connection = unixsocket.connect(self._path)
        try:
            with self._sending:
                hello = self._hello
            connection.sendall(messages.encode(hello))
        except OSError:
            connection.close()
            raise
        return connection

    def _serve(self, connection: socket.socket) -> None:
        reader = messages.FrameReader()
        try:
            while data := connection.recv(65536):
                for body in reader.feed(data):
                    message = messages.decode_from_supervisor(body)
                    self._take(message)
                    if isinstance(message, messages.Welcome):
                        self._begin(connection, message.heard)
        finally:
            with self._sending:
                if self._socket is not None:  # else nobody has welcomed us: still the same loss
                    self._socket = None
                    self._lost_at_s = time.monotonic()
            connection.close()
            with self.changed:
                self.changed.notify_all()

    def _begin(self, connection: socket.socket, heard: int | None) -> None:
        """Welcomed: send again what nobody has taken, then what was kept."""
        with self._sending:
            if heard is not None:
                lost = min(max(0, self._sent_count - heard), len(self._sent))
                self._unsent.extendleft(self._sent.pop() for _ in range(lost))
                self._sent_count = heard
            self._socket = connection
            self._refused = False
            self._flush()

    def _note(self, message: messages.WorkerMessage) -> None:
        """Keep for Hello what another supervisor would have to know; the caller holds the lock."""
        name = _HELLO_FACTS.get(type(message))
        if name is not None:
            self._hello = msgspec.structs.replace(self._hello, **{name: message})
        elif isinstance(message, messages.Broken):
            newest = max(message.generation, self._hello.broken_generation)
            self._hello = msgspec.structs.replace(self._hello, broken_generation=newest)

    def _flush(self) -> None:
        """Send what is queued; the caller holds the lock."""
        while self._unsent and self._socket is not None:
            try:
                self._socket.sendall(self._unsent[0])
            except OSError:
                return  # the reading side notices, reconnects, and sends what is left
            self._sent.append(self._unsent.popleft())
            self._sent_count += 1

    def _take(self, message: messages.SupervisorMessage) -> None:
        newer: Plan | None = None
        with self.changed:
            orders = self.orders
            match message:
                case messages.Welcome(formed=formed, plan=plan, job_uid=job_uid):
                    orders.job_uid = job_uid
                    orders.formed = max(orders.formed, formed)
                    newer = self._newer(plan)
                case messages.PlanPublished(plan=plan):
                    newer = self._newer(plan)
                case messages.FormedMark(generation=generation):
                    orders.formed = max(orders.formed, generation)
                case messages.CommitAnswer(ask=ask):
                    orders.answers[ask] = message
                case messages.StopAfterIteration(reason=reason):
                    orders.stop_reason = reason
                case messages.CommitNow():
                    orders.commit_now += 1
                case messages.Leave(reason=reason):
                    orders.leave_reason = reason
                    self._refused = True
            self.changed.notify_all()
        if newer is not None:
            self._on_plan(newer)

    def _newer(self, plan: Plan | None) -> Plan | None:
        """Take a plan if it is newer; then the plan itself."""
        newest = self.orders.plan
        if plan is None or (newest is not None and plan.generation <= newest.generation):
            return None
        self.orders.plan = plan
        return plan
