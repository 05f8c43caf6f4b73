"""Marks of membership changes, the same on every dashboard."""

from typing import Final

from rallypoint.ops.grafana import promql
from rallypoint.ops.grafana.model import Marks

CHANGES: Final = (
    Marks(
        name="somebody was lost",
        expr=promql.risen("membership_changes_total", f'cause=~"{promql.LOSSES}"', by="job, cause"),
        text="{{job}}: {{cause}}",
        colour="red",
    ),
    Marks(
        name="planned change",
        expr=promql.risen("membership_changes_total", f'cause!~"{promql.LOSSES}"', by="job, cause"),
        text="{{job}}: {{cause}}",
        colour="blue",
    ),
)
"""A generation has formed: for what reason."""
