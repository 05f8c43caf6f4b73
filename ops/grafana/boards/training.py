"""Training: does it learn, and what holds it up."""

from typing import Final

from rallypoint.ops.grafana.boards.common import CHANGES
from rallypoint.ops.grafana.model import Dashboard, Panel, Query, Row, Unit
from rallypoint.ops.grafana.promql import least, rate, risen_by, select, whole

_NOW: Final = (
    Panel(
        title="Does it learn?",
        answers="Mean return of the episodes that ended in the newest iteration, against that of the range.",
        kind="stat",
        queries=(
            Query(expr=whole("train_objective_rewards"), legend="return"),
            Query(
                expr=f"{whole('train_objective_rewards')} - max by (job) (avg_over_time("
                f"{select('train_objective_rewards', window='[$__range]')}))",
                legend="above the range's mean",
            ),
        ),
        base="red",
        thresholds=((0, "green"),),
        colours={"return": "green"},
        width=8,
        height=5,
    ),
    Panel(
        title="Iteration",
        answers="Newest committed iteration, and how many a second.",
        kind="stat",
        queries=(
            Query(expr=whole("iteration"), legend="iteration"),
            Query(
                expr=f"max by (job) (rate({select('iterations_total', window='[$__rate_interval]')}))",
                legend="a second",
            ),
        ),
        base="text",
        width=6,
        height=5,
    ),
    Panel(
        title="Not finite",
        answers="Mini-batches in this range that were left out because a loss or gradient was not finite.",
        kind="stat",
        queries=(
            Query(
                expr=f"max by (job) (increase({select('non_finite_total', window='[$__range]')}))",
                legend="mini-batches",
            ),
        ),
        unit="none",
        decimals=0,
        thresholds=((0.5, "red"),),
        width=4,
        height=5,
    ),
    Panel(
        title="Ranks agree",
        answers="State hashes in this range that differed between ranks.",
        kind="stat",
        queries=(Query(expr=risen_by("state_hash_mismatches_total"), legend="mismatches"),),
        unit="none",
        decimals=0,
        thresholds=((0.5, "red"),),
        width=3,
        height=5,
    ),
    Panel(
        title="Learning rate",
        answers="After the last optimiser step.",
        kind="stat",
        queries=(Query(expr=whole("train_lr"), legend="now"),),
        base="text",
        width=3,
        height=5,
    ),
)


def _figures(title: str, answers: str, *lines: tuple[str, str], unit: Unit = "short") -> Panel:
    """Figures of the trainer, by legend."""
    return Panel(
        title=title,
        answers=answers,
        kind="timeseries",
        queries=tuple(Query(expr=whole(f"train_{name}"), legend=legend) for name, legend in lines),
        unit=unit,
        width=8,
        height=7,
    )


_LEARNING: Final = (
    _figures("Return", "Mean over episodes that ended.", ("objective_rewards", "return")),
    _figures("Reward of a step", "Mean over env steps.", ("reward_mean", "reward")),
    _figures(
        "Length of episodes", "In steps, mean over those that ended.", ("objective_length", "steps")
    ),
    _figures(
        "Losses",
        "Of the policy and of the value, means over samples.",
        ("loss_policy_avg", "policy"),
        ("loss_value_avg", "value"),
    ),
    _figures(
        "How far the policy moves",
        "KL from the policy that collected, and the share of samples out of the clip range.",
        ("policy_approxkl_avg", "KL"),
        ("policy_clipfrac_avg", "clipped"),
    ),
    _figures(
        "Exploration",
        "Entropy of the policy and mean standard deviation of its noise.",
        ("loss_entropy_avg", "entropy"),
        ("policy_mean_noise_std", "noise"),
    ),
    _figures(
        "Gradient", "Norm before clipping, mean over optimiser steps.", ("gradient_norm", "norm")
    ),
    _figures("Learning rate over time", "After the last optimiser step.", ("lr", "learning rate")),
    _figures(
        "Policy ratio",
        "Mean over samples; about 1.",
        ("val_ratio", "mean"),
        ("val_ratio_var", "variance"),
    ),
)
_SPEED: Final = (
    _figures(
        "An iteration",
        "Seconds of rollout and update, means over ranks.",
        ("collection_time", "rollout"),
        ("learn_time", "update"),
        unit="s",
    ),
    Panel(
        title="Rollout by worker",
        answers="The slowest holds all others up.",
        kind="timeseries",
        queries=(
            Query(
                expr=least("worker_rollout_seconds", by="instance, slot"),
                legend="{{instance}}/{{slot}}",
            ),
        ),
        unit="s",
        minimum=0,
        width=8,
        height=7,
    ),
    Panel(
        title="Time in collectives",
        answers="Worker-seconds a second in each, the wait for slower ranks included.",
        kind="timeseries",
        queries=(Query(expr=rate("collective_seconds_sum", by="name"), legend="{{name}}"),),
        minimum=0,
        stacked=True,
        width=8,
        height=7,
    ),
)
DASHBOARD: Final = Dashboard(
    slug="training",
    title="rallypoint / training",
    answers="Does it learn, and what holds it up?",
    rows=(Row("", _NOW), Row("Learning", _LEARNING), Row("Speed", _SPEED)),
    marks=CHANGES,
)
