"""Log lines carry what a reader filters by."""

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from rallypoint.daemon.executors import logs
from rallypoint.daemon.shared.config import LogSection


@pytest.fixture(autouse=True)
def reset_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines_have_the_facts_of_the_moment() -> None:
    stream, facts = io.StringIO(), {"job": "default", "node": "local", "generation": 1}
    logs.configure(LogSection(level="info"), lambda: facts, stream)
    log = structlog.get_logger("test")
    log.info("first", worker="local/0#1")
    facts["generation"] = 2
    log.debug("not shown")
    log.warning("second")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(e["event"], e["generation"], e["level"]) for e in lines] == [
        ("first", 1, "info"),
        ("second", 2, "warning"),
    ]
    assert all(e["job"] == "default" and e["node"] == "local" and e["timestamp"] for e in lines)


def test_a_reader_that_goes_away_stops_nothing() -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logs.configure(LogSection(), dict, ClosedPipe())
    structlog.get_logger("test").error("nobody reads this")


def test_console_lines_are_text() -> None:
    stream = io.StringIO()
    logs.configure(LogSection(format="console"), dict, stream)
    structlog.get_logger("test").info("worker_started", pid=3)
    assert "worker_started" in stream.getvalue()
    assert "pid=3" in stream.getvalue()
