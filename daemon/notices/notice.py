"""What a watcher says, and what it is."""

from dataclasses import dataclass
from typing import Literal, Protocol

from rallypoint.daemon.shared.errors import RallypointError

Source = Literal["aws", "gcp", "azure"]
"""As in ``preemption.sources``."""


class MetadataError(RallypointError):
    """A metadata service does not answer, or not with what its protocol promises."""


@dataclass(frozen=True)
class Notice:
    """This machine is about to be taken away, or may be."""

    source: Source
    """Who says so."""
    id: str
    """Source and event: the same whenever the same notice is read again."""
    left_s: float | None
    """Seconds until it goes, by the source's own clock; negative: since it should have gone. None: a
    hint without a deadline."""
    text: str
    """For people: who says what."""
    lasts: bool = False
    """The source gives no time, so that the notice looks the same for ever: ``left_s`` counts from when
    it was first seen."""


class Watcher(Protocol):
    """One source on one machine."""

    @property
    def name(self) -> str:
        """For the log; unique among the watchers of a node."""
        ...

    @property
    def every_s(self) -> float:
        """Pause between two looks, in seconds."""
        ...

    async def look(self) -> tuple[Notice, ...]:
        """The notices that stand now. May wait for a change. Raises `MetadataError`."""
        ...

    async def left(self) -> None:
        """This node has left the job on a notice: tell the source, where it wants to know. Raises
        `MetadataError`."""
        ...
