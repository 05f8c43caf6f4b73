"""Probing a worker's own port."""

import asyncio
import socket

from rallypoint.daemon.executors.probe import probe
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
