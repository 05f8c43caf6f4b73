"""A progress bar on standard error, where that is a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A context manager; elsewhere than on a terminal nothing is shown."""

    def __init__(self, what: str, total_bytes: int | None) -> None:
        """``total_bytes`` None: it is not known, and a pulse shows that work goes on."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(what, total=total_bytes)

    def add(self, size_bytes: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, size_bytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
