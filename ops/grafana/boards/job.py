"""One job: is it training, on how many workers of how many, how fast, when was the last loss."""

from typing import Final

from rallypoint.ops.grafana.boards.marks import CHANGES
from rallypoint.ops.grafana.model import Colour, Dashboard, Panel, Query, Row
from rallypoint.ops.grafana.promql import rate, total, whole, whole_rate

STATE_COLOURS: Final[dict[str, Colour]] = {
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
_NOW: Final = (
    Panel(
        title="Workers",
        answers="How many train now, of how many slots.",
        kind="stat",
        queries=(
            Query(expr=total("members", 'state="training"'), legend="train"),
            Query(expr=total("members"), legend="slots"),
        ),
        unit="none",
        base="red",
        thresholds=((1, "green"),),
        width=5,
        height=5,
    ),
    Panel(
        title="Env steps a second",
        answers="Env steps that entered committed iterations; what recoveries cost is in it.",
        kind="stat",
        queries=(Query(expr=whole_rate("env_steps_total"), legend="now"),),
        unit="short",
        decimals=1,
        width=5,
        height=5,
    ),
)
_OVER_TIME: Final = (
    Panel(
        title="Workers by state",
        answers="Slots of all nodes by what their worker does.",
        kind="timeseries",
        queries=(Query(expr=total("members", by="state"), legend="{{state}}"),),
        unit="none",
        decimals=0,
        minimum=0,
        stacked=True,
        stepped=True,
        colours=STATE_COLOURS,
        width=12,
        height=8,
    ),
    Panel(
        title="Where the time of workers goes",
        answers="Share of the workers' seconds by activity.",
        kind="timeseries",
        queries=(
            Query(
                expr=f"{rate('wall_seconds_total', by='activity')}"
                f" / on () group_left () {rate('wall_seconds_total', by='')}",
                legend="{{activity}}",
            ),
        ),
        unit="percentunit",
        minimum=0,
        maximum=1,
        stacked=True,
        width=12,
        height=8,
    ),
    Panel(
        title="Iteration",
        answers="Newest committed iteration.",
        kind="timeseries",
        queries=(Query(expr=whole("iteration"), legend="iteration"),),
        width=12,
        height=7,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="job",
    title="rallypoint / job",
    answers="Is it training, on how many workers, how fast, and when was somebody lost last?",
    rows=(Row("", _NOW), Row("Over time", _OVER_TIME)),
    marks=CHANGES,
)
