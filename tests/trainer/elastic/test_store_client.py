"""The client of rank 0's store is given up as soon as a newer plan is there."""

import socket
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from rallypoint.trainer.elastic import storeclient
from rallypoint.trainer.errors import Superseded

HOST = "127.0.0.1"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answers", ["open", "closed"])
def test_a_newer_plan_ends_the_wait_for_a_store(answers: str) -> None:
    """The port is open and nobody answers, as while its process dies; or it is closed."""
    newer, tries = threading.Event(), 0

    def check() -> None:
        nonlocal tries
        tries += 1
        if newer.is_set():
            raise Superseded("generation 2 is superseded by 3")

    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        if answers == "closed":
            server.close()
        threading.Timer(0.1, newer.set).start()
        with pytest.raises(Superseded, match="superseded by 3"):
            storeclient.connect(HOST, port, 600.0, check)
    assert tries > 1


def test_a_store_that_answers_is_found() -> None:
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client = storeclient.connect(HOST, server.port, 10.0, lambda: None)
    client.set("here", "1")
    server.wait(["here"], timedelta(seconds=10))
    assert server.get("here") == b"1"
