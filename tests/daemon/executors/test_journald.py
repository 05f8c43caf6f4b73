"""Entries of systemd's journal, as a server of its protocol reads them."""

import contextlib
import io
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from rallypoint.daemon.executors import journald, logs
from rallypoint.daemon.shared.config import Config, LogSection
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes import facts as made

WORKER = WorkerKey("local", 0, 2)


class Journal:
    """Receives entries on a socket of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "journal")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(10)
        self.stderr = (directory / "stderr").open("w")
        """What systemd says is the journal."""

    def configure(self, **section: str) -> None:
        """Log as a service does."""
        status, plan = os.fstat(self.stderr.fileno()), made.plan(4, WORKER)
        logs.configure(
            LogSection(**section),  # type: ignore[arg-type]
            lambda worker: logs.facts(Config(), 6, plan, worker),
            self.stderr,
            {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"},
        )

    def printed(self) -> str:
        """What came to standard error all the same."""
        self.stderr.flush()
        return Path(self.stderr.name).read_text()

    def close(self) -> None:
        self.stderr.close()
        self.socket.close()

    def entry(self) -> dict[str, str]:
        """The next one."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
        for descriptor in descriptors:
            with os.fdopen(descriptor, "rb") as file:
                file.seek(0)
                data = file.read()
        return dict(parsed(data))


def parsed(data: bytes) -> Iterator[tuple[str, str]]:
    """Fields of one entry."""
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", data[:8])
            value, end, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
            assert end == b"\n"
        yield name.decode(), value.decode()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    served = Journal(tmp_path)
    monkeypatch.setattr(journald, "SOCKET", served.path)
    yield served
    served.close()
    structlog.reset_defaults()


def test_an_entry_has_fields_of_its_own(journal: Journal) -> None:
    journal.configure()
    log = structlog.get_logger("test")
    log.warning(
        "worker_exited", worker=WORKER, reason="exit code 1", output_tail=("a", "b"), rest=None
    )
    entry = journal.entry()
    assert entry.pop("RALLYPOINT_TIMESTAMP")
    assert entry == {
        "MESSAGE": 'worker_exited worker=local/0#2 reason=exit code 1 output_tail=["a", "b"]',
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "rallypoint",
        "RALLYPOINT_EVENT": "worker_exited",
        "RALLYPOINT_LEVEL": "warning",
        "RALLYPOINT_JOB": "default",
        "RALLYPOINT_NODE": "local",
        "RALLYPOINT_GENERATION": "4",
        "RALLYPOINT_RANK": "0",
        "RALLYPOINT_INCARNATION": "2",
        "RALLYPOINT_WORKER": "local/0#2",
        "RALLYPOINT_REASON": "exit code 1",
        "RALLYPOINT_OUTPUT_TAIL": '["a", "b"]',
    }
    assert journal.printed() == "", "no line comes twice"


@pytest.mark.parametrize("size", [10, 500_000], ids=["in-a-datagram", "in-a-memory-file"])
def test_text_with_line_breaks_of_any_size_arrives(journal: Journal, size: int) -> None:
    journal.configure()
    text = "Traceback ä\n  line=1\n" * size
    structlog.get_logger("test").error("worker_fault", traceback=text)
    entry = journal.entry()
    assert entry["RALLYPOINT_TRACEBACK"] == text
    assert entry["PRIORITY"] == "3"
    assert entry["MESSAGE"] == f"worker_fault traceback={text}"


def test_lines_that_the_journal_did_not_take_are_counted(journal: Journal) -> None:
    journal.configure()
    log = structlog.get_logger("test")
    os.rename(journal.path, f"{journal.path}.away")
    log.info("first")
    log.info("second")
    os.rename(f"{journal.path}.away", journal.path)
    log.info("third")
    log.info("fourth")
    entries = [journal.entry(), journal.entry()]
    assert [e["RALLYPOINT_EVENT"] for e in entries] == ["third", "fourth"]
    assert [e.get("RALLYPOINT_LINES_LOST") for e in entries] == ["2", None]


def test_a_journal_that_reads_nothing_holds_nobody_up(journal: Journal) -> None:
    journal.configure()
    log = structlog.get_logger("test")
    taken = _fill(journal)
    log.info("nobody has room for this")
    for _ in range(taken):
        journal.entry()
    log.info("next")
    assert journal.entry()["RALLYPOINT_LINES_LOST"] == "1"


def _fill(journal: Journal) -> int:
    """Send until its queue is full, also where that holds more than one sender may have under way; how
    many it took."""
    taken = 0
    with contextlib.ExitStack() as senders:
        for _ in range(1000):
            other = senders.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            other.setblocking(False)
            before = taken
            with contextlib.suppress(BlockingIOError):
                while other.sendto(b"A=b\n", journal.path):
                    taken += 1
            if taken == before:
                return taken
    raise AssertionError("its queue has no end")


def test_where_the_journal_is_not_meant_lines_are_json(journal: Journal) -> None:
    journal.configure(format="json")
    structlog.get_logger("test").info("asked for")
    assert '"event": "asked for"' in journal.printed()

    stream = io.StringIO()  # no file: no device and inode to compare
    logs.configure(LogSection(), lambda _: {}, stream, {"JOURNAL_STREAM": "1:2"})
    structlog.get_logger("test").info("a pipe of somebody else")
    assert '"event": "a pipe of somebody else"' in stream.getvalue()
