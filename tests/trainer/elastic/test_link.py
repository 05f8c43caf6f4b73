"""The worker's end of the control socket across the death of supervisors."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.shared import messages, unixsocket
from rallypoint.trainer.elastic.link import Link
from tests.fakes.facts import A, committed

WAIT_S = 60.0


class Listener:
    """A supervisor's socket; answers when the test says so."""

    def __init__(self, path: Path) -> None:
        self._server = unixsocket.listen(path)
        self._server.settimeout(WAIT_S)

    def accept(self) -> None:
        self.connection, _ = self._server.accept()
        self.connection.settimeout(WAIT_S)
        self._reader = messages.FrameReader()
        self._taken: list[messages.WorkerMessage] = []
        hello = self.next()
        assert isinstance(hello, messages.Hello)
        self.hello = hello

    def welcome(self, heard: int | None) -> None:
        welcome = messages.Welcome(supervisor_incarnation=1, formed=0, plan=None, heard=heard)
        self.connection.sendall(messages.encode(welcome))

    def next(self) -> messages.WorkerMessage:
        while not self._taken:
            data = self.connection.recv(65536)
            assert data
            self._taken += [messages.decode_from_worker(body) for body in self._reader.feed(data)]
        return self._taken.pop(0)

    def iterations(self, count: int) -> list[int]:
        found = [self.next() for _ in range(count)]
        return [m.iteration for m in found if isinstance(m, messages.Committed)]

    def die(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def close(self) -> None:
        self.connection.close()
        self._server.close()


@pytest.fixture(name="listener")
def listening(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "control.sock")
    yield listener
    listener.close()


@pytest.fixture(name="link")
def fresh_link(tmp_path: Path, listener: Listener) -> Iterator[Link]:
    hello = messages.Hello(key=A, pid=1, start_ticks=1, versions={}, config_hash="h")
    link = Link(
        tmp_path / "control.sock",
        hello,
        orphan_grace_s=WAIT_S,
        on_plan=lambda _: None,
        on_abandoned=lambda: None,
    )
    link.start()
    yield link
    link.close()


def say(link: Link, *iterations: int) -> None:
    for iteration in iterations:
        link.send(committed(A, iteration, {A: 60}))


def test_what_a_dead_supervisor_had_not_taken_is_said_again(link: Link, listener: Listener) -> None:
    listener.accept()
    assert (listener.hello.committed, listener.hello.formed) == (None, None)
    say(link, 1, 2)
    listener.welcome(0)
    say(link, 3)
    assert link.flush(WAIT_S)
    listener.die()  # it had taken one, and counted that
    listener.accept()
    say(link, 4)
    listener.welcome(1)
    assert listener.iterations(3) == [2, 3, 4]
    listener.die()
    listener.accept()
    assert listener.hello.committed is not None
    assert listener.hello.committed.iteration == 4
    listener.welcome(4)
    say(link, 5)
    assert listener.iterations(1) == [5], "nothing twice"


def test_a_supervisor_that_does_not_count_gets_what_was_kept(
    link: Link, listener: Listener
) -> None:
    listener.accept()
    listener.welcome(None)
    say(link, 1)
    assert listener.iterations(1) == [1]
    listener.die()
    listener.accept()
    say(link, 2)
    listener.welcome(None)
    assert listener.iterations(1) == [2]


def test_hello_says_what_another_supervisor_must_know(link: Link, listener: Listener) -> None:
    listener.accept()
    for generation in (3, 2):
        link.send(messages.Broken(key=A, generation=generation, phase="", error="", at_s=0.0))
    ready = messages.Ready(
        key=A, host="h", port=1, device="cpu", capacity_envs=0, last_formed=0, checkpoint=None
    )
    link.send(ready)
    listener.die()
    listener.accept()
    assert listener.hello.broken_generation == 3
    assert listener.hello.ready == ready
    assert not link.flush(0.05), "nobody has welcomed it"


def test_a_refused_worker_does_not_wait_for_a_listener(link: Link, listener: Listener) -> None:
    listener.accept()
    listener.connection.sendall(messages.encode(messages.Leave(reason="not ours")))
    with link.changed:
        assert link.changed.wait_for(lambda: link.orders.leave_reason == "not ours", WAIT_S)
    say(link, 1)
    assert not link.flush(WAIT_S)
