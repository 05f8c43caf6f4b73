"""Probing a worker's own port."""

import asyncio
import socket

from rallypoint.daemon.executors.probe import AT_ONCE, probe
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes.facts import A, B, C


def test_who_answers_who_is_gone_and_who_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as living, socket.socket() as silent:
        with socket.create_server(("127.0.0.1", 0)) as closing:
            dead = closing.getsockname()
        # A full backlog drops what comes next: the kernel answers nothing, like a cut-off host.
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        filled = [socket.socket() for _ in range(4)]
        for one in filled:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        targets = {A: living.getsockname(), B: dead, C: silent.getsockname()}
        answer = asyncio.run(probe(7, targets, 0.2))
        for one in filled:
            one.close()
    assert (answer.probe, answer.answering, answer.gone, answer.silent) == (7, (A,), (B,), (C,))


def test_whom_the_process_table_knows_to_be_gone_is_not_asked() -> None:
    assert asyncio.run(probe(1, {A: None}, 0.1)).gone == (A,)


def test_many_are_asked_in_turn_and_names_are_looked_up() -> None:
    keys = [WorkerKey("a", slot, 1) for slot in range(AT_ONCE + 40)]
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as living:
        with socket.create_server(("127.0.0.1", 0)) as closing:
            dead = closing.getsockname()
        port = living.getsockname()[1]
        targets = {key: ("127.0.0.1", port) if key.slot % 2 else dead for key in keys}
        targets |= {A: ("localhost", port), B: ("no-such-host.invalid", port), C: ("::1", port)}
        answer = asyncio.run(probe(8, targets, 5.0))
    assert answer.answering == (*(key for key in keys if key.slot % 2), A)
    assert set(keys) - set(answer.answering) < set(answer.gone)
    assert B in answer.silent
    assert C not in answer.answering, "nobody listens there"
