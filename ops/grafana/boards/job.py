"""One job: is it training, on how many workers of how many, how fast, when was the last loss."""

from typing import Final

from rallypoint.ops.grafana.boards.common import (
    ACTIVITY_COLOURS,
    CHANGES,
    GOODPUT_OF_RANGE,
    JOB_STATES,
    LOSS_AGE,
    LOSS_SECONDS,
    STATE,
    TRAINING,
    WANTED,
    WORKER_COLOURS,
)
from rallypoint.ops.grafana.model import Dashboard, Panel, Query, Row
from rallypoint.ops.grafana.promql import least, share, total, whole, whole_rate

_NOW: Final = (
    Panel(
        title="Is it training?",
        answers="State of the job, as the node with the worst view of it shows it.",
        kind="stat",
        queries=(Query(expr=STATE, legend="state"),),
        texts=JOB_STATES,
        width=4,
        height=5,
    ),
    Panel(
        title="On how many workers?",
        answers="Workers that train now, how many the job wants, and how many of those are missing.",
        kind="stat",
        queries=(
            Query(expr=TRAINING, legend="train"),
            Query(expr=WANTED, legend="wanted"),
            Query(expr=f"clamp_min({WANTED} - {TRAINING}, 0)", legend="missing"),
        ),
        unit="none",
        thresholds=((1, "orange"),),
        colours={"train": "text", "wanted": "text"},
        width=6,
        height=5,
    ),
    Panel(
        title="How fast?",
        answers="Env steps that entered committed iterations, a second; what recoveries cost is in it.",
        kind="stat",
        queries=(Query(expr=whole_rate("env_steps_total"), legend="env steps a second"),),
        base="red",
        thresholds=((0.001, "green"),),
        width=5,
        height=5,
    ),
    Panel(
        title="When was the last loss?",
        answers="Since a worker or node was lost last; from then to the survivors' next optimiser step.",
        kind="stat",
        queries=(
            Query(expr=LOSS_AGE, legend="ago"),
            Query(expr=LOSS_SECONDS, legend="took"),
        ),
        unit="s",
        colours={"ago": "text"},
        thresholds=((5, "orange"), (30, "red")),
        width=6,
        height=5,
    ),
    Panel(
        title="Goodput",
        answers="Share of all workers' seconds in this range that went into rollouts and updates.",
        kind="stat",
        queries=(Query(expr=GOODPUT_OF_RANGE, legend="of this range"),),
        unit="percentunit",
        base="red",
        thresholds=((0.5, "orange"), (0.8, "green")),
        width=3,
        height=5,
    ),
)
_OVER_TIME: Final = (
    Panel(
        title="Env steps a second",
        answers="Of all ranks; what recoveries cost is in it.",
        kind="timeseries",
        queries=(Query(expr=whole_rate("env_steps_total"), legend="env steps a second"),),
        minimum=0,
        width=12,
        height=8,
    ),
    Panel(
        title="Workers by state",
        answers="Slots of all nodes by what their worker does.",
        kind="timeseries",
        queries=tuple(
            Query(expr=total("members", f'state="{state}"'), legend=state)
            for state in WORKER_COLOURS
        ),
        unit="none",
        decimals=0,
        minimum=0,
        stacked=True,
        stepped=True,
        colours=WORKER_COLOURS,
        width=12,
        height=8,
    ),
    Panel(
        title="Where the time of workers goes",
        answers="Share of the workers' seconds by activity.",
        kind="timeseries",
        queries=tuple(
            Query(expr=share("wall_seconds_total", f'activity="{activity}"'), legend=activity)
            for activity in ACTIVITY_COLOURS
        ),
        unit="percentunit",
        minimum=0,
        maximum=1,
        stacked=True,
        colours=ACTIVITY_COLOURS,
        width=12,
        height=8,
    ),
    Panel(
        title="Return",
        answers="Mean return of the episodes that ended in the newest iteration.",
        kind="timeseries",
        queries=(Query(expr=whole("train_objective_rewards"), legend="return"),),
        width=6,
        height=8,
    ),
    Panel(
        title="Iteration",
        answers="Newest committed iteration; a flat stretch is time without progress.",
        kind="timeseries",
        queries=(Query(expr=whole("iteration"), legend="iteration"),),
        width=6,
        height=8,
    ),
)
_HEALTH: Final = (
    Panel(
        title="Since the last commit",
        answers="Time without a committed iteration.",
        kind="timeseries",
        queries=(Query(expr=least("progress_age_seconds"), legend="since a commit"),),
        unit="s",
        minimum=0,
        width=6,
        height=6,
    ),
    Panel(
        title="Age of the newest checkpoint",
        answers="What a loss of all workers would cost.",
        kind="timeseries",
        queries=(Query(expr=least("checkpoint_age_seconds"), legend="age"),),
        unit="s",
        minimum=0,
        width=6,
        height=6,
    ),
    Panel(
        title="Slowest rank over the median",
        answers="Every rank waits for the slowest rollout.",
        kind="timeseries",
        queries=(Query(expr=whole("straggler_ratio"), legend="ratio"),),
        minimum=1,
        thresholds=((1.5, "orange"),),
        width=6,
        height=6,
    ),
    Panel(
        title="Envs",
        answers="Envs of all workers, and how many are missing to the budget.",
        kind="timeseries",
        queries=(
            Query(expr=whole("envs", 'scope="global"'), legend="all"),
            Query(expr=whole("envs", 'scope="deficit"'), legend="missing"),
        ),
        minimum=0,
        stepped=True,
        colours={"all": "green", "missing": "orange"},
        width=6,
        height=6,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="job",
    title="rallypoint / job",
    answers="Is it training, on how many workers, how fast, and when was somebody lost last?",
    rows=(Row("", _NOW), Row("Over time", _OVER_TIME), Row("Health", _HEALTH)),
    marks=CHANGES,
)
