"""How a global env budget is split over ranks; the arithmetic lives in `daemon.shared.envbudget`."""

from rallypoint.daemon.shared.envbudget import split

__all__ = ["split"]
