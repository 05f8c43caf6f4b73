"""What a metric is: an entry of the table in `metrictable`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from rallypoint.daemon.shared.figures import Scope

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)
MARGINS: Final = (0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 10, 30)
DYNAMIC: Final = ()
"""In the place of a label's values: they are known only when there is something to say."""


@dataclass(frozen=True)
class Spec:
    """One metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    scope: Scope
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """All values of each label: their series exist from the start; or `DYNAMIC`."""
    unit: Literal["", "seconds", "bytes", "ratio"] = ""
    """Of the value; it stands in the name."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""
