"""Errors of the pure decisions."""

from rallypoint.daemon.shared.errors import RallypointError

RECENT_EVENTS = 32
"""How many of the last events a machine keeps, to say what led to an invalid one."""
LINE_CHARS = 400


Recent = tuple[tuple[float, object], ...]
"""(now, event), oldest first."""


class InvalidTransition(RallypointError):
    """An event that the state does not list: a fault of rallypoint itself, never of its environment.

    ``recent`` holds the last events, oldest first; the invalid one is the last.
    """

    def __init__(self, what: str, recent: Recent) -> None:
        self.recent = recent
        log = "".join(f"\n  {now:.3f} {event!r}"[:LINE_CHARS] for now, event in recent)
        super().__init__(
            f"{what}; this is a fault of rallypoint: report it with the events before it:{log}"
        )


def remember(recent: Recent, event: object, now: float) -> Recent:
    """``recent`` with this event appended, cut to the last ``RECENT_EVENTS``."""
    return (*recent, (now, event))[-RECENT_EVENTS:]
