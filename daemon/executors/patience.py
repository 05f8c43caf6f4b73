"""Work on a store that may not answer: done again until it is, and what stands in its way."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from rallypoint.daemon.errors import StoreError

_RETRY_S: Final = 0.5

_log = structlog.get_logger(__name__)


class Patience:
    """One for all that a node asks of its store. Each kind of work has its own trouble: a store that is
    full renews leases and writes no record."""

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}
        self._answered = False
        self.at_trouble: Callable[[], Awaitable[None]] | None = None
        """What to do whenever the store has not done what it was asked."""

    @property
    def trouble(self) -> str:
        """What the store refuses, or that it does not answer; "" while all goes well."""
        none = "" if self._answered else "the membership store has not answered yet"
        return next(iter(self._troubles.values()), none)

    async def until_done(self, what: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Do ``work`` again until the store has carried it out."""
        while True:
            try:
                await work()
            except StoreError as error:
                await self.pause_after(what, error)
            else:
                self.done(what)
                return

    async def pause_after(self, what: str, error: StoreError) -> None:
        """Wait before the next try. The first trouble is logged, and so is its end."""
        if not self._troubles:
            _log.warning("store_unavailable", reason=f"{error}; tried again until it does")
        self._troubles[what] = str(error)
        if self.at_trouble is not None:
            await self.at_trouble()
        await asyncio.sleep(_RETRY_S)

    def done(self, what: str) -> None:
        """This kind of work goes well."""
        self._answered = True
        if self._troubles.pop(what, None) is not None and not self._troubles:
            _log.info("store_back", reason="the membership store does all that it is asked again")
