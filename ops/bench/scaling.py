"""``rallypoint bench scaling``: env steps a second by world size, and the bytes of each collective.

One real job after the other. Efficiency is env steps a second per worker over those of the smallest
world size. Bytes are what the workers counted in their collectives, beside what the registry says.
"""

import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from rallypoint.daemon.shared.collectives import TABLE, Collective, Sizes
from rallypoint.daemon.shared.configload import Given, from_text, load, parse_assignment
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench.job import START_BOUND_S, Job
from rallypoint.ops.bench.throughput import BOUND_S, WARM_UP, rate_of_journal
from rallypoint.trainer.sizes import find_sizes

_SCRAPES: Final = 5

Counters = Mapping[tuple[str, str], float]
"""(metric, value of its label ``name``) -> value."""


@dataclass(frozen=True)
class Traffic:
    """One collective of one job, over all workers."""

    name: str
    when: str
    calls: float
    """Of one worker."""
    measured_bytes: float | None
    """That one rank put in, a call (gradients: a mini-batch). None: it did not run, or was not counted."""
    registry_bytes: int
    seconds: float
    """A call, waiting for slower ranks included."""

    @property
    def agrees(self) -> bool:
        """Whether the registry says what was measured."""
        return self.measured_bytes in (None, self.registry_bytes)


@dataclass(frozen=True)
class Size:
    """One world size."""

    workers: int
    num_envs: int
    env_steps_per_second: float
    traffic: tuple[Traffic, ...]


def measure(directory: Path, workers: int, iterations: int, assignments: Sequence[str]) -> Size:
    """Run one job. Raises `BenchError` when it does not train undisturbed, `ConfigError` for what the
    registry does not size."""
    given: list[Given] = [parse_assignment(text) for text in assignments]
    given.append(from_text("node.workers", str(workers), "--workers"))
    config = load(command_line=given).config
    if config.ppo.reduction != "ddp":
        raise ConfigError("bench scaling measures ppo.reduction = 'ddp'")
    directory.mkdir(parents=True)
    own = ["job.iterations=none", "membership.join_debounce_s=60"]  # all from the start
    with Job(directory, workers, [*assignments, *own]) as job:
        job.wait_until_complete(START_BOUND_S)
        end = WARM_UP + iterations
        status = job.wait_for(f"iteration {end}", lambda s: (s["iteration"] or 0) >= end, BOUND_S)
        sizes = find_sizes(config)
        for _ in range(_SCRAPES):  # one may fall between two counters of a report
            traffic = traffic_of(scrape(status["metrics_url"]), sizes, workers)
            if all(one.agrees for one in traffic):
                break
        job.journal.read()
    rate = rate_of_journal(job.journal.lines, workers)
    return Size(workers, status["num_envs"], rate, traffic)


def scrape(url: str) -> Counters:
    """All series with a label ``name``."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the job's own address
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("rallypoint_"), sample.labels["name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "name" in sample.labels
    }


def traffic_of(counters: Counters, sizes: Sizes, workers: int) -> tuple[Traffic, ...]:
    """What workers counted, beside the registry."""
    return tuple(_traffic(entry, counters, sizes, workers) for entry in TABLE)


def _traffic(entry: Collective, counters: Counters, sizes: Sizes, workers: int) -> Traffic:
    count = counters["collective_seconds_count", entry.name]
    # Gradients come in as many buckets as DDP makes: their unit is the mini-batch.
    unit = "mini_batch" if entry.name == "gradients" else entry.name
    calls = counters["collective_seconds_count", unit] if count else 0.0
    total = counters["collective_bytes_total", entry.name]
    return Traffic(
        name=entry.name,
        when=entry.when,
        calls=calls / workers,
        measured_bytes=total / calls if calls else None,
        registry_bytes=entry.size_bytes(sizes),
        seconds=counters["collective_seconds_sum", entry.name] / calls if calls else 0.0,
    )


def document(sizes: Sequence[Size], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that one run found."""
    base = sizes[0].env_steps_per_second / sizes[0].workers
    return {
        "benchmark": "scaling",
        **settings,
        "cores": os.cpu_count(),
        "agrees": all(one.agrees for size in sizes for one in size.traffic),
        "sizes": [
            {
                "workers": size.workers,
                "num_envs": size.num_envs,
                "env_steps_per_second": size.env_steps_per_second,
                "speed_up": size.env_steps_per_second / sizes[0].env_steps_per_second,
                "efficiency": size.env_steps_per_second / size.workers / base,
                "collectives": [{**asdict(one), "agrees": one.agrees} for one in size.traffic],
            }
            for size in sizes
        ],
    }


def text(found: Mapping[str, Any]) -> str:
    """The document as tables."""
    lines = [
        f"{found['task']}, {found['cores']} cores, {found['iterations']} iterations each",
        "",
        f"{'workers':>7}{'envs':>8}{'env steps/s':>14}{'speed-up':>10}{'efficiency':>12}",
    ]
    for size in found["sizes"]:
        rate = f"{size['env_steps_per_second']:,.0f}"
        lines.append(
            f"{size['workers']:>7}{size['num_envs']:>8}{rate:>14}{size['speed_up']:>10.2f}"
            f"{size['efficiency']:>12.2f}"
        )
    last = found["sizes"][-1]
    lines += [
        "",
        f"with {last['workers']} workers: bytes that one rank puts in (gradients: a mini-batch)",
        f"{'collective':<20}{'calls':>8}{'measured':>14}{'registry':>12}{'ms':>10}",
    ]
    for one in last["collectives"]:
        measured = "-" if one["measured_bytes"] is None else f"{one['measured_bytes']:,.0f}"
        lines.append(
            f"{one['name']:<20}{one['calls']:>8.0f}{measured:>14}{one['registry_bytes']:>12,}"
            f"{1e3 * one['seconds']:>10.2f}" + ("" if one["agrees"] else "  DIFFERS")
        )
    verdict = "the registry's bytes are those measured, for every number of workers"
    return "\n".join([*lines, "", verdict if found["agrees"] else "BYTES DIFFER from the registry"])
