"""Logging: one event name per fact, with job, node and generation on every line.

JSON lines to stderr, for journald; coloured text on a terminal.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rallypoint.daemon.shared.config import LogSection

_LEVELS: Final = logging.getLevelNamesMapping()


def configure(
    section: LogSection,
    facts: Callable[[], Mapping[str, Any]],
    stream: TextIO | None = None,
) -> None:
    """Set up structlog for this process. ``facts`` gives what every line carries."""
    stream = sys.stderr if stream is None else stream
    lasting = cast(TextIO, _LastingStream(stream))
    console = section.format == "console" or (section.format == "auto" and stream.isatty())

    def add_facts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**facts(), **event}

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
        processors.append(structlog.processors.JSONRenderer())
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[section.level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=lasting),
        cache_logger_on_first_use=False,
    )


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
