"""What a simulated run can end with."""

from rallypoint.daemon.shared.errors import RallypointError


class Violation(RallypointError):
    """A rule of the membership was broken; the first word of the message names the invariant."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        super().__init__(f"{name}: {what}")
