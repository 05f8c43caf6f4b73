"""All jobs: which of them needs somebody to look."""

from typing import Final

from rallypoint.ops.grafana.boards.common import (
    CHANGES,
    GOODPUT,
    GOODPUT_OF_RANGE,
    JOB_STATES,
    LOSS_AGE,
    STATE,
    TRAINING,
    WANTED,
)
from rallypoint.ops.grafana.model import Column, Dashboard, Panel, Query, Row
from rallypoint.ops.grafana.promql import (
    LOSSES,
    least,
    quantile,
    rate,
    risen_by,
    select,
    total,
    whole,
    whole_rate,
)

_LOST: Final = f'cause=~"{LOSSES}"'
_NOW: Final = (
    Panel(
        title="Which job needs a look?",
        answers="One row for each job, the worst state first; losses, lost steps and goodput are of the range shown.",
        kind="table",
        queries=(
            Query(expr=STATE, legend="state"),
            Query(expr=TRAINING, legend="train"),
            Query(expr=WANTED, legend="wanted"),
            Query(expr=least("progress_age_seconds"), legend="last commit"),
            Query(expr=whole_rate("env_steps_total"), legend="env steps/s"),
            Query(expr=whole("iteration"), legend="iteration"),
            Query(expr=GOODPUT_OF_RANGE, legend="goodput"),
            Query(
                expr=f"max by (job) (sum by (job, instance) (increase("
                f"{select('membership_changes_total', _LOST, window='[$__range]')})))",
                legend="losses",
            ),
            Query(expr=LOSS_AGE, legend="last loss"),
            Query(expr=least("checkpoint_age_seconds"), legend="checkpoint"),
        ),
        columns=(
            Column(texts=JOB_STATES),
            Column(unit="none"),
            Column(unit="none"),
            Column(unit="s", thresholds=((0, "green"), (60, "orange"), (300, "red"))),
            Column(),
            Column(unit="none"),
            Column(unit="percentunit", thresholds=((0, "red"), (0.5, "orange"), (0.8, "green"))),
            Column(unit="none", decimals=0),
            Column(unit="s"),
            Column(unit="s"),
        ),
        width=24,
        height=6,
    ),
)
_JOBS: Final = (
    Panel(
        title="Env steps a second",
        answers="Of each job, everything included.",
        kind="timeseries",
        queries=(Query(expr=whole_rate("env_steps_total"), legend="{{job}}"),),
        minimum=0,
        width=12,
        height=8,
    ),
    Panel(
        title="Goodput",
        answers="Share of the workers' seconds that goes into rollouts and updates.",
        kind="timeseries",
        queries=(Query(expr=GOODPUT, legend="{{job}}"),),
        unit="percentunit",
        minimum=0,
        maximum=1,
        width=6,
        height=8,
    ),
    Panel(
        title="Workers that train",
        answers="Of each job.",
        kind="timeseries",
        queries=(Query(expr=TRAINING, legend="{{job}}"),),
        unit="none",
        decimals=0,
        minimum=0,
        stepped=True,
        width=6,
        height=8,
    ),
)
_NODES: Final = (
    Panel(
        title="Supervisors that answer",
        answers="Nodes whose /metrics is scraped.",
        kind="timeseries",
        queries=(Query(expr=f"count by (job) ({select('generation')})", legend="{{job}}"),),
        unit="none",
        decimals=0,
        minimum=0,
        stepped=True,
        width=6,
        height=7,
    ),
    Panel(
        title="Slots in quarantine",
        answers="Slots that crash again and again, or whose node comes and goes.",
        kind="timeseries",
        queries=(
            Query(
                expr=total("slot_quarantined", by="job, instance"), legend="{{job}} {{instance}}"
            ),
        ),
        unit="none",
        decimals=0,
        minimum=0,
        stepped=True,
        width=6,
        height=7,
    ),
    Panel(
        title="What is left of the lease",
        answers="Of each node, now; not above 0: it commits nothing and enters nothing. Embedded membership has none.",
        kind="timeseries",
        queries=(
            Query(
                expr=least("lease_margin_seconds", by="job, instance"),
                legend="{{job}} {{instance}}",
            ),
        ),
        unit="s",
        minimum=0,
        thresholds=((1, "orange"),),
        width=6,
        height=7,
    ),
    Panel(
        title="Calls to etcd that failed",
        answers="A second, by why; and whether a node has trouble with its store (1).",
        kind="timeseries",
        queries=(
            Query(expr=rate("etcd_errors_total", by="kind"), legend="{{kind}}"),
            Query(expr=whole("store_trouble"), legend="{{job}}: trouble"),
        ),
        minimum=0,
        width=6,
        height=7,
    ),
    Panel(
        title="Calls to etcd",
        answers="Time that 95 of 100 stay below, by kind of call; embedded membership makes none.",
        kind="timeseries",
        queries=(
            Query(
                expr=quantile(0.95, "etcd_request_seconds", by="call", window="$__rate_interval"),
                legend="{{call}}",
            ),
        ),
        unit="s",
        minimum=0,
        width=12,
        height=7,
    ),
    Panel(
        title="Workers started again",
        answers="In the range shown, by how the life before ended.",
        kind="bargauge",
        queries=(
            Query(
                expr=f"sort_desc({risen_by('worker_restarts_total', by='reason')} > 0)",
                legend="{{reason}}",
            ),
        ),
        unit="none",
        decimals=0,
        base="orange",
        width=6,
        height=7,
    ),
    Panel(
        title="Preemption notices",
        answers="In the range shown: nodes that left, hints, and machines that stayed. What was announced as a node "
        "ended may be missing; the marks have it.",
        kind="bargauge",
        queries=(
            Query(expr=risen_by("notices_total", by="kind"), legend="{{kind}}"),
            Query(
                expr=f"{risen_by('notices_total', by='source')} > 0",
                legend="{{source}}",
                may_be_empty="most jobs run where no machine is taken away",
            ),
        ),
        unit="none",
        decimals=0,
        base="blue",
        width=6,
        height=7,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="fleet",
    title="rallypoint / fleet",
    answers="Which job needs somebody to look?",
    rows=(Row("", _NOW), Row("Jobs", _JOBS), Row("Nodes and store", _NODES)),
    marks=CHANGES,
    many_jobs=True,
)
