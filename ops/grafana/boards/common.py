"""What several dashboards show: marks of membership changes, states and their colours."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rallypoint.ops.grafana import promql
from rallypoint.ops.grafana.model import Colour, Marks

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

_STATES: Final[tuple[tuple[str, Colour], ...]] = (
    ("finished", "light-blue"),
    ("running", "green"),
    ("starting", "yellow"),
    ("paused", "purple"),
    ("holding", "orange"),
    ("failed", "red"),
)
JOB_STATES: Final[Mapping[int, tuple[str, Colour]]] = MappingProxyType(dict(enumerate(_STATES, 1)))
"""By a number, the worst last: of several nodes the greatest is shown."""
STATE: Final = promql.coded(
    "job_state", "state", {code: state for code, (state, _) in JOB_STATES.items()}
)
WORKER_COLOURS: Final[Mapping[str, Colour]] = MappingProxyType(
    {
        "training": "green",
        "ready": "light-blue",
        "warming": "light-green",
        "starting": "yellow",
        "rebuilding": "orange",
        "waiting": "purple",
        "draining": "blue",
        "lost": "red",
        "quarantined": "red",
        "stopped": "text",
    }
)
ACTIVITY_COLOURS: Final[Mapping[str, Colour]] = MappingProxyType(
    {
        "rollout": "green",
        "update": "light-blue",
        "statistics": "blue",
        "checkpoint": "purple",
        "recovery": "red",
        "warm_up": "yellow",
        "hold": "orange",
        "drain": "light-green",
        "idle": "text",
    }
)
PHASE_COLOURS: Final[Mapping[str, Colour]] = MappingProxyType(
    {
        "detect": "red",
        "plan": "yellow",
        "release": "purple",
        "group": "blue",
        "sync": "light-blue",
        "envs": "text",
        "first_step": "green",
    }
)
"""One after the other; as in ``rallypoint status --watch``."""
USEFUL: Final = 'activity=~"rollout|update|statistics"'
"""Time that training needs."""
GOODPUT: Final = promql.share("wall_seconds_total", USEFUL)
GOODPUT_OF_RANGE: Final = promql.share("wall_seconds_total", USEFUL, window="$__range")
TRAINING: Final = promql.total("members", 'state="training"')
WANTED: Final = promql.whole("world_size_wanted")
LOSS_AGE: Final = promql.least("last_change_age_seconds", 'kind="forced"')
LOSS_SECONDS: Final = promql.whole("last_change_seconds", 'kind="forced"')
