"""Following what a node has to know of its job, and nothing more.

Each change of a member record concerns the leader alone. Would every node follow all of them, a change
of generation, after which each node writes its record, would cost as many messages as the square of the
number of nodes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.daemon.executors.store import MembershipStore, WatchEvent


@dataclass(frozen=True)
class Span:
    """The keys that start with ``prefix``, with ``end`` only those before it."""

    prefix: str
    end: str = ""


async def follow(
    store: MembershipStore,
    spans: Sequence[Span],
    from_revision: int,
    take: Callable[[WatchEvent], None],
    until: asyncio.Event,
) -> bool:
    """Hand on what changes in these spans, each in order of revision. True when ``until`` was set, False
    when the store was closed; raises what a watch raises."""

    async def watch(span: Span) -> None:
        async for event in store.watch(span.prefix, from_revision, end=span.end):
            take(event)

    watches = [asyncio.ensure_future(watch(span)) for span in spans]
    stopped = asyncio.ensure_future(until.wait())
    try:
        done, _ = await asyncio.wait((*watches, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*watches, stopped):
            task.cancel()
        await asyncio.gather(*watches, stopped, return_exceptions=True)
    for task in done:
        task.result()
    return stopped in done


class Paced:
    """Calls ``say`` soon after each `stir`, once for all that come before. ``say`` gives the seconds that
    have to pass before it is called again: a decision about a thousand records must not be taken a
    thousand times when all of them change."""

    def __init__(self, say: Callable[[], float]) -> None:
        self._say = say
        self._due: asyncio.TimerHandle | None = None
        self._rests_until_s = 0.0

    def stir(self) -> None:
        """There is something to say."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(loop.time(), self._rests_until_s), self._now)

    def _now(self) -> None:
        self._due = None
        self._rests_until_s = asyncio.get_running_loop().time() + self._say()
