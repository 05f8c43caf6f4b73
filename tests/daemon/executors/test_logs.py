"""Log lines carry what a reader filters by."""

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from rallypoint.daemon.executors import logevents, logs
from rallypoint.daemon.shared.config import Config, LogSection
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes import facts as made


@pytest.fixture(autouse=True)
def reset_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines_have_the_facts_of_the_moment() -> None:
    stream, facts = io.StringIO(), {"job": "default", "node": "local", "generation": 1}
    logs.configure(LogSection(level="info"), lambda _: facts, stream)
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


def test_a_line_says_of_whom_it_is() -> None:
    """Rank and incarnation are those of the worker that it is about, else there is no rank, and the
    incarnation is the supervisor's."""
    member, stream = WorkerKey("local", 1, 3), io.StringIO()
    plan = made.plan(7, member)
    logs.configure(LogSection(), lambda worker: logs.facts(Config(), 5, plan, worker), stream)
    log = structlog.get_logger("test")
    log.info("worker_started", worker=member)
    log.info("worker_started", worker=WorkerKey("local", 0, 9))
    log.info("lease_lost")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    said = [(e.get("worker"), e["rank"], e["incarnation"], e["generation"]) for e in lines]
    assert said == [("local/1#3", 0, 3, 7), ("local/0#9", None, 9, 7), (None, None, 5, 7)]
    assert {e["job"] for e in lines} == {"default"}
    assert all(set(logevents.BOUND) <= set(e) for e in lines)


def test_a_reader_that_goes_away_stops_nothing() -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logs.configure(LogSection(), lambda _: {}, ClosedPipe())
    structlog.get_logger("test").error("nobody reads this")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_colours_and_anything_else_json(terminal: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    logs.configure(LogSection(), lambda _: {"job": "walk"}, stream)
    structlog.get_logger("test").info("worker_started", pid=3)
    (line,) = stream.getvalue().splitlines()
    if terminal:
        assert "\x1b[" in line
    else:
        assert json.loads(line)["event"] == "worker_started"


def test_console_lines_are_text() -> None:
    stream = io.StringIO()
    logs.configure(LogSection(format="console"), lambda _: {}, stream)
    structlog.get_logger("test").info("worker_started", pid=3)
    assert "worker_started" in stream.getvalue()
    assert "pid=3" in stream.getvalue()
