"""The queries of a panel, with Grafana's variables filled in, asked of a real Prometheus."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rallypoint.ops.grafana.model import Marks, Panel, Query
from rallypoint.ops.grafana.prometheus import Prometheus, PrometheusError, Series, Span

_LEGEND: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_SCRAPES_OF_A_RATE: Final = 4
"""Grafana's: a rate is taken over at least this many scrapes."""


@dataclass(frozen=True)
class Context:
    """What Grafana's variables stand for."""

    span: Span
    job: str | None
    """None: all jobs."""
    scrape_s: float

    def fill(self, expr: str) -> str:
        """The expression as Prometheus takes it."""
        step_s = self.span.step_s
        rate_s = max(step_s + self.scrape_s, _SCRAPES_OF_A_RATE * self.scrape_s)
        values = {
            "$__rate_interval": _duration(rate_s),
            "$__interval": _duration(step_s),
            "$__range": _duration(self.span.end_s - self.span.start_s),
            "$job": _pattern(self.job),
        }
        for name, value in values.items():
            expr = expr.replace(name, value)
        return expr


@dataclass(frozen=True)
class Answer:
    """One named line of a panel."""

    name: str
    query: Query
    series: Series

    @property
    def last(self) -> float | None:
        """The newest value that is a number."""
        points = self.series.finite
        return points[-1][1] if points else None


def answers(server: Prometheus, panel: Panel, context: Context) -> list[Answer]:
    """Everything that a panel shows. Raises `PrometheusError`."""
    return [
        Answer(legend(query.legend, series), query, series)
        for query in panel.queries
        for series in ask(server, query.expr, context, instant=panel.instant)
    ]


def ask(server: Prometheus, expr: str, context: Context, *, instant: bool) -> list[Series]:
    """The series of one expression."""
    filled = context.fill(expr)
    if instant:
        return server.instant(filled, context.span.end_s)
    return server.range(filled, context.span)


def moments(server: Prometheus, marks: Marks, context: Context) -> Iterator[tuple[float, str]]:
    """When (unix seconds) these marks are, and what each says."""
    for series in ask(server, marks.expr, context, instant=False):
        text = legend(marks.text, series)
        yield from ((at_s, text) for at_s, value in series.finite if value > 0.0)


def legend(text: str, series: Series) -> str:
    """The name of a series: its labels in a text, or all of them."""
    if not text:
        return ", ".join(f"{name}={value}" for name, value in series.labels.items())
    return _LEGEND.sub(lambda found: series.labels.get(found[1], ""), text)


def scrape_interval_s(server: Prometheus, job: str, at_s: float) -> float:
    """How far apart the samples of a job are, in the median. Raises `PrometheusError` when there are
    fewer than two."""
    selector = f'rallypoint_generation{{job=~"{_pattern(job)}"}}'
    apart_s = [
        later - earlier
        for series in server.samples(f"{selector}[5m]", at_s)
        for (earlier, _), (later, _) in pairwise(series.points)
    ]
    if not apart_s:
        raise PrometheusError(
            f"{server.url}: no two samples of {selector} in the five minutes before the end of the range;"
            " is the supervisor's /metrics scraped, and is the range one in which it was?"
        )
    return statistics.median(apart_s)


def _pattern(job: str | None) -> str:
    """As it stands between the quotes of a matcher."""
    return ".+" if job is None else re.escape(job).replace("\\", "\\\\")


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
