"""Checkpoints: what a loss of everybody would cost, and whether they are taken."""

from typing import Final

from rallypoint.ops.grafana.boards.common import CHANGES
from rallypoint.ops.grafana.model import Dashboard, Panel, Query, Row
from rallypoint.ops.grafana.promql import least, mean, quantile, risen_by, share, total, whole

_AGE: Final = least("checkpoint_age_seconds")
_NOW: Final = (
    Panel(
        title="What would be lost?",
        answers="Age of the newest checkpoint, and iterations since: trained again if all were lost now.",
        kind="stat",
        queries=(
            Query(expr=_AGE, legend="age"),
            Query(expr=whole("checkpoint_period_seconds"), legend="longest of late"),
        ),
        unit="s",
        colours={"longest of late": "text"},
        width=7,
        height=5,
    ),
    Panel(
        title="Iterations since",
        answers="Committed iterations that no checkpoint has yet.",
        kind="stat",
        queries=(
            Query(
                expr=f"{whole('iteration')} - {whole('checkpoint_iteration')}", legend="iterations"
            ),
        ),
        unit="none",
        width=4,
        height=5,
    ),
    Panel(
        title="Do they succeed?",
        answers="In the range shown; passed over: due, and never written, since one before it took so long.",
        kind="stat",
        queries=(
            Query(expr=risen_by("checkpoint_persist_seconds_count"), legend="committed"),
            Query(expr=risen_by("checkpoint_failures_total"), legend="failed"),
            Query(expr=risen_by("checkpoint_passed_over_total"), legend="passed over"),
        ),
        unit="none",
        decimals=0,
        colours={"committed": "text"},
        thresholds=((0.5, "red"),),
        width=5,
        height=5,
    ),
    Panel(
        title="What do they cost?",
        answers="Share of the workers' seconds in this range in which training stood still for them.",
        kind="stat",
        queries=(
            Query(
                expr=share("wall_seconds_total", 'activity="checkpoint"', window="$__range"),
                legend="of the time",
            ),
        ),
        unit="percentunit",
        decimals=2,
        thresholds=((0.01, "orange"), (0.05, "red")),
        width=4,
        height=5,
    ),
    Panel(
        title="How big?",
        answers="The newest one.",
        kind="stat",
        queries=(Query(expr=whole("checkpoint_size_bytes"), legend="bytes"),),
        unit="bytes",
        base="text",
        width=4,
        height=5,
    ),
)
_OVER_TIME: Final = (
    Panel(
        title="Age of the newest checkpoint",
        answers="A saw: up with the time, down with each commit. A tooth that is too high is one that failed.",
        kind="timeseries",
        queries=(Query(expr=_AGE, legend="age"),),
        unit="s",
        minimum=0,
        width=12,
        height=8,
    ),
    Panel(
        title="Age by tier",
        answers="Of the newest that each tier took; no line: there is no such tier.",
        kind="timeseries",
        queries=(Query(expr=least("checkpoint_tier_age_seconds", by="tier"), legend="{{tier}}"),),
        unit="s",
        minimum=0,
        width=12,
        height=8,
    ),
    Panel(
        title="From snapshot to durable",
        answers="Mean, and what 95 of 100 stay below, of the range shown up to each moment.",
        kind="timeseries",
        queries=(
            Query(expr=mean("checkpoint_persist_seconds", window="$__range"), legend="mean"),
            Query(expr=quantile(0.95, "checkpoint_persist_seconds"), legend="95 %, below"),
        ),
        unit="s",
        minimum=0,
        width=8,
        height=7,
    ),
    Panel(
        title="Training stood still",
        answers="For each checkpoint, mean of the range shown up to each moment.",
        kind="timeseries",
        queries=(Query(expr=mean("checkpoint_stall_seconds", window="$__range"), legend="mean"),),
        unit="s",
        minimum=0,
        width=8,
        height=7,
    ),
    Panel(
        title="Failures by tier",
        answers="Since the supervisors began; training goes on, but what a total loss costs grows.",
        kind="timeseries",
        queries=(
            Query(expr=total("checkpoint_tier_failures_total", by="tier"), legend="{{tier}}"),
        ),
        unit="none",
        decimals=0,
        minimum=0,
        stepped=True,
        width=8,
        height=7,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="checkpoints",
    title="rallypoint / checkpoints",
    answers="What would a loss of everybody cost, and are checkpoints taken?",
    rows=(Row("", _NOW), Row("Over time", _OVER_TIME)),
    marks=CHANGES,
)
