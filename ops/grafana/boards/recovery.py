"""Recoveries: how long they take, where that time goes, and what it costs."""

from typing import Final

from rallypoint.ops.grafana.boards.common import (
    ACTIVITY_COLOURS,
    CHANGES,
    LOSS_AGE,
    LOSS_SECONDS,
    PHASE_COLOURS,
)
from rallypoint.ops.grafana.model import Dashboard, Panel, Query, Row
from rallypoint.ops.grafana.promql import (
    LOSSES,
    mean,
    quantile,
    rate,
    risen_by,
    select,
    whole,
)

_FORCED: Final = ('kind="forced"', 'phase="total"')
_NOW: Final = (
    Panel(
        title="When was the last loss, and how long did it take?",
        answers="Since a worker or node was lost last; from then to the survivors' next optimiser step.",
        kind="stat",
        queries=(
            Query(expr=LOSS_AGE, legend="ago"),
            Query(expr=LOSS_SECONDS, legend="took"),
            Query(expr=whole("recovery_age_seconds"), legend="going on for"),
        ),
        unit="s",
        colours={"ago": "text"},
        thresholds=((5, "orange"), (30, "red")),
        width=8,
        height=5,
    ),
    Panel(
        title="How long do they take?",
        answers="From the notice of a loss to the survivors' next optimiser step, in this range.",
        kind="stat",
        queries=(
            Query(expr=quantile(0.5, "recovery_seconds", *_FORCED), legend="half, below"),
            Query(expr=quantile(0.95, "recovery_seconds", *_FORCED), legend="95 %, below"),
        ),
        unit="s",
        thresholds=((5, "orange"), (30, "red")),
        width=6,
        height=5,
    ),
    Panel(
        title="How many?",
        answers="Generations that formed in this range: because somebody was lost, and for other reasons.",
        kind="stat",
        queries=tuple(
            Query(
                expr="max by (job) (sum by (job, instance) (increase("
                f"{select('membership_changes_total', matcher, window='[$__range]')})))",
                legend=legend,
            )
            for matcher, legend in (
                (f'cause=~"{LOSSES}"', "losses"),
                (f'cause!~"{LOSSES}"', "planned"),
            )
        ),
        unit="none",
        decimals=0,
        colours={"losses": "orange", "planned": "light-blue"},
        width=5,
        height=5,
    ),
    Panel(
        title="What was lost?",
        answers="Env steps that were collected in this range and never used, of all that were collected.",
        kind="stat",
        queries=(
            Query(
                expr=f"{risen_by('env_steps_lost_total')} / (max by (job) (increase("
                f"{select('env_steps_total', window='[$__range]')})) + {risen_by('env_steps_lost_total')})",
                legend="env steps",
            ),
        ),
        unit="percentunit",
        thresholds=((0.01, "orange"), (0.05, "red")),
        width=5,
        height=5,
    ),
)


def _phases(kind: str, title: str) -> Panel:
    seconds = {
        phase: mean("recovery_seconds", f'kind="{kind}"', f'phase="{phase}"', window="$__range")
        for phase in PHASE_COLOURS
    }
    seconds["plan"] = f"{seconds['plan']} - {seconds['detect']}"  # it begins with the other
    return Panel(
        title=title,
        answers="Mean seconds of each phase in this range, one after the other.",
        kind="bargauge",
        queries=tuple(Query(expr=expr, legend=phase) for phase, expr in seconds.items()),
        unit="s",
        colours=PHASE_COLOURS,
        width=12,
        height=7,
    )


_WHERE: Final = (
    _phases("forced", "After a loss"),
    _phases("planned", "At a planned change"),
    Panel(
        title="Recovery going on",
        answers="Since the loss that is not recovered from yet; 0 when all train.",
        kind="timeseries",
        queries=(Query(expr=whole("recovery_age_seconds", by="instance"), legend="{{instance}}"),),
        unit="s",
        minimum=0,
        width=12,
        height=7,
    ),
    Panel(
        title="Time that each survivor lost",
        answers="Mean of a change: from the safe point, or the loss, until it collects or updates again.",
        kind="bargauge",
        queries=(
            Query(
                expr=f"sort_desc(({mean('change_stall_seconds', by='cause', window='$__range')}) > 0)",
                legend="{{cause}}",
            ),
        ),
        unit="s",
        base="light-blue",
        width=12,
        height=7,
    ),
)
_COST: Final = (
    Panel(
        title="Workers' time that was not training",
        answers="Worker-seconds a second by activity, without rollout, update and statistics.",
        kind="timeseries",
        queries=(
            Query(
                expr=rate(
                    "wall_seconds_total", 'activity!~"rollout|update|statistics"', by="activity"
                ),
                legend="{{activity}}",
            ),
        ),
        minimum=0,
        stacked=True,
        colours=ACTIVITY_COLOURS,
        width=12,
        height=7,
    ),
    Panel(
        title="Env steps lost",
        answers="In the range shown: died with its process, dropped for another's state, cut.",
        kind="bargauge",
        queries=(Query(expr=risen_by("env_steps_lost_total", by="reason"), legend="{{reason}}"),),
        decimals=0,
        base="orange",
        width=6,
        height=7,
    ),
    Panel(
        title="Generations by cause",
        answers="In the range shown.",
        kind="bargauge",
        queries=(
            Query(
                expr="sort_desc((max by (cause) (increase("
                f"{select('membership_changes_total', window='[$__range]')}))) > 0)",
                legend="{{cause}}",
            ),
        ),
        unit="none",
        decimals=0,
        base="light-blue",
        width=6,
        height=7,
    ),
)
_WHY: Final = (
    Panel(
        title="Why workers' time was lost",
        answers="Worker-seconds of this range that were no progress, by what caused them, the greatest first.",
        kind="bargauge",
        queries=(
            Query(
                expr=f"sort_desc({risen_by('badput_seconds_total', by='cause')} > 0)",
                legend="{{cause}}",
            ),
        ),
        unit="s",
        base="orange",
        width=12,
        height=9,
    ),
    Panel(
        title="Workers' time in recoveries",
        answers="Worker-seconds of this range by phase; restart: a slot that had lost its worker.",
        kind="bargauge",
        queries=(
            Query(
                expr=f"{risen_by('recovery_wall_seconds_total', by='phase')} > 0",
                legend="{{phase}}",
            ),
        ),
        unit="s",
        colours={**PHASE_COLOURS, "restart": "orange"},
        width=12,
        height=9,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="recovery",
    title="rallypoint / recovery",
    answers="How long do recoveries take, where does the time go, and what do they cost?",
    rows=(Row("", _NOW), Row("Where the time goes", _WHERE), Row("What it costs", _COST + _WHY)),
    marks=CHANGES,
)
