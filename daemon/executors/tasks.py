"""The tasks of a supervisor: none is lost, and none fails unseen."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """``fail`` is told what ended a task, other than its cancellation."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this beside everything else."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """End all of them."""
        for task in self._running:
            task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
