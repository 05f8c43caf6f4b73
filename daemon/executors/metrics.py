"""The registry of the metrics that the supervisor exposes, made from `metrictable.TABLE`.

Every label value is created beforehand, so that a rate over a rare event starts from zero. Counters
add up over all lives of workers; a dead worker leaves no series behind. Changed from the event loop
alone, and read from any thread.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from rallypoint.daemon.errors import (
    LeaseExpiredError,
    StoreError,
    StorePermissionError,
    StoreQuotaError,
    StoreUnavailableError,
)
from rallypoint.daemon.executors.books import Total
from rallypoint.daemon.executors.metricspec import Spec
from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared import collectives
from rallypoint.daemon.shared.figures import tag

_MAX_TRAIN_FIGURES: Final = 128
_ERROR_KINDS: Final = {
    StoreUnavailableError: "unavailable",
    StoreQuotaError: "quota",
    StorePermissionError: "permission",
    LeaseExpiredError: "lease_expired",
}
_UNITS: Final = {
    "_m_s": "_meters_per_second",
    "_rad_s": "_radians_per_second",
    "_m": "_meters",
    "_rad": "_radians",
    "_s": "_seconds",
}
"""How figures end, longest first -> how their metrics do."""


class Metrics:
    """The metrics of one supervisor, in a registry of their own."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._summaries: dict[str, _Summary] = {}
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for spec in TABLE:
            self._create(spec)
        self._figures = _TrainFigures()
        self.registry.register(self._figures)
        ProcessCollector(registry=self.registry)  # CPU, memory, files and start of this process

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Raise a counter. ``amount`` must not be negative."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)
        key = (name, tuple(labels.items()))
        self._totals[key] = self._totals.get(key, 0.0) + amount

    def totals(self) -> tuple[Total, ...]:
        """Every counter that was ever raised."""
        return tuple(Total(name, dict(ls), value) for (name, ls), value in self._totals.items())

    def restore(self, totals: Iterable[Total]) -> None:
        """Go on from the counters of the supervisor before; one that this version does not have is
        left out."""
        labels = {spec.name: spec.labels for spec in TABLE if spec.kind == "counter"}
        for total in totals:
            values = labels.get(total.name)
            if (
                values is not None
                and values.keys() == total.labels.keys()
                and all(value in values[label] for label, value in total.labels.items())
            ):
                self.add(total.name, total.value, **total.labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Put a value into a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(seconds)

    def forget(self, name: str, *values: str) -> None:
        """Drop the series of a gauge with these label values, if there is one."""
        with contextlib.suppress(KeyError):
            self._gauges[name].remove(*values)

    def etcd_request(self, call: str, seconds: float, error: StoreError | None) -> None:
        """One call to etcd took this long, and failed with this, if it did."""
        self.observe("etcd_request_seconds", seconds, call=call)
        if error is not None:
            self.add("etcd_errors_total", kind=_ERROR_KINDS.get(type(error), "other"))

    def count_collectives(self, uses: Mapping[str, collectives.Use]) -> None:
        """What a worker reports of its collectives, by name; one that is not known here is of an
        adopted worker of another version, and is left out."""
        for name, use in uses.items():
            if name in collectives.NAMES:
                self._summaries["collective_seconds"].add(name, use.calls, use.seconds)
                self.add("collective_bytes_total", use.size_bytes, name=name)

    def compute(self, name: str, value: Callable[[], float], **labels: str) -> None:
        """Let a gauge be computed at each scrape."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def set_train_figures(self, figures: Mapping[str, float]) -> None:
        """Replace the ``rallypoint_train_*`` gauges by the figures of the newest iteration."""
        self._figures.figures = dict(list(figures.items())[:_MAX_TRAIN_FIGURES])

    def _create(self, spec: Spec) -> None:
        if spec.kind == "summary":
            summary = self._summaries[spec.name] = _Summary(spec)
            self.registry.register(summary)
            return
        name, labels = f"rallypoint_{spec.name}", tuple(spec.labels)
        metric: Counter | Gauge | Histogram
        match spec.kind:
            case "counter":
                metric = Counter(name, spec.help, labels, registry=self.registry)
                self._counters[spec.name] = metric
            case "gauge":
                metric = Gauge(name, spec.help, labels, registry=self.registry)
                self._gauges[spec.name] = metric
            case "histogram":
                metric = Histogram(
                    name, spec.help, labels, registry=self.registry, buckets=spec.buckets
                )
                self._histograms[spec.name] = metric
        if labels:
            for values in product(*spec.labels.values()):
                metric.labels(*values)


class _Summary(Collector):
    """Counts and sums by the value of one label; the client library's own takes one value at a time."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        ((_, values),) = spec.labels.items()
        self._sums = dict.fromkeys(values, (0, 0.0))

    def add(self, value: str, count: int, seconds: float) -> None:
        """Count values that add up to ``seconds``."""
        before = self._sums[value]
        self._sums[value] = before[0] + count, before[1] + seconds

    def collect(self) -> Iterator[SummaryMetricFamily]:
        family = SummaryMetricFamily(
            f"rallypoint_{self._spec.name}", self._spec.help, labels=tuple(self._spec.labels)
        )
        for value, (count, seconds) in self._sums.items():
            family.add_metric([value], count, seconds)
        yield family


class _TrainFigures(Collector):
    """Figures of the trainer, whatever they are: the supervisor knows none of them by name."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for key, value in self.figures.items():
            text = f"{tag(key)} of the newest iteration."
            yield GaugeMetricFamily(train_name(key), text, value=value)


def train_name(figure: str) -> str:
    """The metric that shows a figure of the trainer. Prometheus wants units written out."""
    name = f"rallypoint_train_{re.sub(r'[^a-zA-Z0-9_]', '_', tag(figure)).lower()}"
    short = next((end for end in _UNITS if name.endswith(end)), "")
    return name.removesuffix(short) + _UNITS.get(short, "")
