"""The table of metrics."""

from rallypoint.daemon.executors.metrictable import TABLE


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
