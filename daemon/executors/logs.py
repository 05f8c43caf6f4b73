"""Logging: one event name per fact (`logevents`), with job, node, generation, rank and incarnation on
every line.

JSON lines to stderr; coloured text on a terminal; entries of the journal where stderr leads to it.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rallypoint.daemon.executors import journald, logevents
from rallypoint.daemon.shared.config import Config, LogSection
from rallypoint.daemon.shared.plan import Plan, WorkerKey

_LEVELS: Final = logging.getLevelNamesMapping()
_BOUND: Final = frozenset(logevents.BOUND)

Facts = Callable[[WorkerKey | None], Mapping[str, Any]]


def facts(
    config: Config, incarnation: int, plan: Plan | None, worker: WorkerKey | None
) -> dict[str, Any]:
    """What every line carries: ``plan`` is the newest formed one, ``incarnation`` that of the supervisor,
    ``worker`` whom the line is about."""
    member = None if plan is None or worker is None else plan.find(worker)
    return {
        "job": config.job.name,
        "node": config.node.name,
        "generation": None if plan is None else plan.generation,
        "rank": None if member is None else member.rank,
        "incarnation": incarnation if worker is None else worker.incarnation,
    }


def configure(
    section: LogSection,
    facts_of: Facts,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Set up structlog for this process. ``facts_of`` gives what a line carries, about that worker."""
    stream = sys.stderr if stream is None else stream
    console = section.format == "console" or (section.format == "auto" and stream.isatty())
    to_journal = section.format == "auto" and journald.is_journal(stream, environ)

    def add_facts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        worker = event.get("worker")
        if isinstance(worker, WorkerKey):
            event["worker"] = str(worker)
        return {**facts_of(worker if isinstance(worker, WorkerKey) else None), **event}

    processors: list[Processor] = [
        add_facts,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=stream.isatty()))
    else:
        processors.append(structlog.processors.format_exc_info)
        processors.append(_as_entry if to_journal else structlog.processors.JSONRenderer())
    lasting = cast(TextIO, _LastingStream(stream))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[section.level.upper()]),
        logger_factory=_journal_loggers()
        if to_journal
        else structlog.WriteLoggerFactory(file=lasting),
        cache_logger_on_first_use=False,
    )


def _as_entry(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {"fields": journald.entry(event, _BOUND)}


def _journal_loggers() -> Callable[..., WrappedLogger]:
    logger = _JournalLogger(journald.JournalSocket(journald.SOCKET))
    return lambda *_: logger


class _JournalLogger:
    """What structlog ends in: a method for each level."""

    def __init__(self, journal: journald.JournalSocket) -> None:
        self._journal = journal

    def info(self, *, fields: Mapping[str, str]) -> None:
        self._journal.send(fields)

    debug = warning = error = info


class _LastingStream:
    """Whoever reads the log may go away (a closed pipe, a full disk): the run goes on without."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
