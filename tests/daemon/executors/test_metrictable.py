"""The table of metrics."""

import pytest

from rallypoint.daemon.executors.metrics import Metrics, train_name
from rallypoint.daemon.executors.metrictable import TABLE

PROMISED: dict[str, set[str]] = {
    "generation": set(),
    "world_size": set(),
    "members": {"state"},
    "membership_changes_total": {"cause"},
    "recovery_seconds": {"kind", "phase"},
    "wall_seconds_total": {"activity"},
    "env_steps_total": set(),
    "env_steps_lost_total": {"reason"},
    "iterations_total": set(),
    "checkpoint_stall_seconds": set(),
    "checkpoint_persist_seconds": set(),
    "checkpoint_age_seconds": set(),
    "checkpoint_failures_total": set(),
    "state_hash_mismatches_total": set(),
    "notices_total": {"source", "kind"},
    "worker_restarts_total": {"reason"},
    "slot_quarantined": set(),
    "straggler_ratio": set(),
    "etcd_request_seconds": set(),
    "collective_seconds": {"name"},
    "envs": {"scope"},
}
"""What others script against, and the labels that they name."""


def test_the_promised_metrics_are_there() -> None:
    table = {spec.name: set(spec.labels) for spec in TABLE}
    for name, labels in PROMISED.items():
        assert labels <= table[name], name


def test_every_metric_is_named_as_monitoring_expects() -> None:
    assert len({spec.name for spec in TABLE}) == len(TABLE)
    for spec in TABLE:
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec.name
        assert spec.help.endswith("."), spec.name
        assert not spec.name.startswith("rallypoint_")
        assert spec.name.removesuffix("_total").endswith(spec.unit), spec.name
        assert ("seconds" in spec.name, "bytes" in spec.name) == (
            spec.unit == "seconds",
            spec.unit == "bytes",
        ), spec.name
        assert bool(spec.buckets) == (spec.kind == "histogram"), spec.name
        assert (spec.scope == "worker") == ("slot" in spec.labels), spec.name


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        ("episode_return_mean", "objective_rewards"),
        ("noise_std", "policy_mean_noise_std"),
        ("figure/velocity_error_m_s", "env_velocity_error_meters_per_second"),
        ("figure/root_error_m", "env_root_error_meters"),
        ("figure/tracking_error_rad", "env_tracking_error_radians"),
        ("episode/rew_feet_slide", "episode_rew_feet_slide"),
    ],
)
def test_figures_have_the_names_of_the_curves_with_whole_units(figure: str, name: str) -> None:
    assert train_name(figure) == f"rallypoint_train_{name}"


def test_figures_are_bounded_and_those_of_before_do_not_stay() -> None:
    """Whatever a trainer of one's own reports: series do not pile up."""

    def shown() -> set[str]:
        names = {family.name for family in metrics.registry.collect()}
        return {name for name in names if name.startswith("rallypoint_train_")}

    metrics = Metrics()
    metrics.set_train_figures({f"figure/own_{n}": float(n) for n in range(1000)})
    assert len(shown()) == 128
    metrics.set_train_figures({"figure/other": 1.0})
    assert shown() == {"rallypoint_train_env_other"}
