"""The metrics that the supervisor exposes, in one table.

Every label value is created beforehand, so that a rate over a rare event starts from zero. Counters
add up over all lives of workers; a dead worker leaves no series behind, because none is per worker.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Final, Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from rallypoint.daemon.core.records import WORKER_STATES
from rallypoint.daemon.executors.books import Total
from rallypoint.daemon.shared import collectives, messages
from rallypoint.daemon.shared.figures import tag
from rallypoint.daemon.shared.plan import CHANGE_CAUSES, CHANGE_KINDS

PHASES: Final = ("detect", "release", "plan", "group", "sync", "envs", "first_step", "total")
ACTIVITIES: Final = (
    "rollout",
    "update",
    "statistics",
    "recovery",
    "checkpoint",
    "warm_up",
    "hold",
    "drain",
    "idle",
)
LOST_REASONS: Final = ("died", "dropped", "cut")
RESTART_REASONS: Final = (
    "signal",
    "error",
    "fault",
    "hang",
    "cold",
    "protocol",
    "killed",
    "spawn_failed",
    "unknown",
)
ENV_SCOPES: Final = ("worker", "global", "deficit")
ETCD_CALLS: Final = (
    "range",
    "put",
    "delete_range",
    "txn",
    "lease_grant",
    "lease_keep_alive",
    "lease_revoke",
    "watch",
    "authenticate",
)
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)
_MAX_TRAIN_FIGURES: Final = 128


@dataclass(frozen=True)
class Spec:
    """One metric: its name without the prefix ``rallypoint_``, and all its label values."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


TABLE: Final = (
    Spec("generation", "gauge", "Newest generation that formed."),
    Spec("world_size", "gauge", "Members of the newest formed generation; 0 before the first."),
    Spec("iteration", "gauge", "Newest committed iteration."),
    Spec("members", "gauge", "Slots of this node by worker state.", {"state": WORKER_STATES}),
    Spec(
        "membership_changes_total",
        "counter",
        "Generations that formed, by what caused them.",
        {"cause": CHANGE_CAUSES},
    ),
    Spec(
        "recovery_seconds",
        "histogram",
        "Time of each phase of a membership change; total is from notice to the first optimiser "
        "step of its last member.",
        {"kind": CHANGE_KINDS, "phase": PHASES},
    ),
    Spec(
        "change_stall_seconds",
        "histogram",
        "Time that each survivor of this node lost to a change of membership: from the safe point (or the "
        "loss) until it collects or updates again, however long ago the change was announced.",
        {"cause": CHANGE_CAUSES},
    ),
    Spec(
        "wall_seconds_total",
        "counter",
        "Seconds of workers by activity: over all of them they add up to their wall time.",
        {"activity": ACTIVITIES},
    ),
    Spec("env_steps_total", "counter", "Env steps that entered a committed iteration."),
    Spec(
        "env_steps_lost_total",
        "counter",
        "Env steps that were collected and never used.",
        {"reason": LOST_REASONS},
    ),
    Spec(
        "env_steps_per_second",
        "gauge",
        "Env steps that entered committed iterations of the newest generation, of all ranks, over its "
        "wall time; the time of recoveries is in recovery_seconds.",
    ),
    Spec("iterations_total", "counter", "Iterations committed, as seen by this supervisor."),
    Spec("envs", "gauge", "Envs of a worker (greatest), of all, and missing to the budget.",
         {"scope": ENV_SCOPES}),
    Spec("checkpoint_age_seconds", "gauge", "Since the newest checkpoint; NaN while there is none."),
    Spec("checkpoint_tier_age_seconds", "gauge",
         "Since the newest checkpoint that this tier took; NaN while there is none.",
         {"tier": messages.TIERS}),
    Spec("checkpoint_stall_seconds", "histogram", "Training time that a checkpoint took."),
    Spec("checkpoint_persist_seconds", "histogram", "From snapshot to committed manifest."),
    Spec("checkpoint_failures_total", "counter", "Checkpoints that could not be committed."),
    Spec("checkpoint_tier_failures_total", "counter", "Those of them that were for this tier.",
         {"tier": messages.TIERS}),
    Spec("state_hash_mismatches_total", "counter", "State hashes that differed between ranks."),
    Spec(
        "worker_restarts_total",
        "counter",
        "Workers started again, by how the life before ended.",
        {"reason": RESTART_REASONS},
    ),
    Spec("slot_quarantined", "gauge", "Slots of this node in quarantine."),
    Spec(
        "straggler_ratio",
        "gauge",
        "Seconds of the slowest rollout over those of the median one, in the newest iteration that "
        "all have reported.",
    ),
    Spec(
        "etcd_request_seconds",
        "histogram",
        "Time of each call to etcd, all tries and endpoints included, also of one that fails; watch: "
        "until it is set up. Empty with embedded membership.",
        {"call": ETCD_CALLS},
    ),
    Spec(
        "collective_seconds",
        "summary",
        "Time in each collective, the wait for slower ranks included, over all workers of this node.",
        {"name": collectives.NAMES},
    ),
    Spec(
        "collective_bytes_total",
        "counter",
        "Bytes that the workers of this node put into each collective.",
        {"name": collectives.NAMES},
    ),
)  # fmt: skip


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

    def etcd_request(self, call: str, seconds: float) -> None:
        """One call to etcd took this long."""
        self.observe("etcd_request_seconds", seconds, call=call)

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
                    name, spec.help, labels, registry=self.registry, buckets=_SECONDS
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
            shown = tag(key)
            name = f"rallypoint_train_{re.sub(r'[^a-zA-Z0-9_]', '_', shown).lower()}"
            yield GaugeMetricFamily(name, f"{shown} of the newest iteration.", value=value)
