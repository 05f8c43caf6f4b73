"""Errors of the pure decisions."""

from rallypoint.daemon.shared.errors import RallypointError

RECENT_EVENTS = 32
"""How many of the last events a machine keeps, to say what led to an invalid one."""


class InvalidTransition(RallypointError):
    """An event that the state does not list: a fault of rallypoint itself, never of its environment.

    ``recent`` holds the last events before it, oldest first, each as ``"<now> <event>"``.
    """

    def __init__(self, what: str, recent: tuple[str, ...]) -> None:
        self.recent = recent
        log = "".join(f"\n  {line}" for line in recent)
        super().__init__(
            f"{what}; this is a fault of rallypoint: report it with the events before it:{log}"
        )


def remember(recent: tuple[str, ...], event: object, now: float) -> tuple[str, ...]:
    """``recent`` with this event appended, cut to the last ``RECENT_EVENTS``."""
    return (*recent, f"{now:.3f} {event!r}"[:400])[-RECENT_EVENTS:]
