"""What a dashboard is: rows of panels with their queries. Pure data; `grafanajson` makes Grafana's JSON of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

Colour = Literal[
    "green", "red", "orange", "yellow", "blue", "purple", "light-blue", "light-green", "text"
]
"""Grafana's names of colours."""
Kind = Literal["stat", "timeseries", "bargauge", "table"]
Unit = Literal["none", "short", "s", "percentunit", "bytes", "Bps", "cps"]
"""Grafana's names: plain number, with k and M, seconds, share of 1, bytes, bytes and counts a second."""
GRID_WIDTH: Final = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """One expression of PromQL. ``$job``, ``$__interval``, ``$__rate_interval`` and ``$__range`` are
    Grafana's to fill in."""

    expr: str
    legend: str = ""
    """``{{label}}`` stands for the value of a label."""
    may_be_empty: str = ""
    """Why a sound job may have no value here; empty where it must have one."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """How a table shows the query of the same place."""

    unit: Unit = "short"
    decimals: int | None = None
    thresholds: tuple[tuple[float, Colour], ...] = ()
    texts: Mapping[int, tuple[str, Colour]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture, or one number."""

    title: str
    answers: str
    """What an operator learns from it; Grafana shows this beside the title."""
    kind: Kind
    queries: tuple[Query, ...]
    width: int
    height: int
    unit: Unit = "short"
    decimals: int | None = None
    thresholds: tuple[tuple[float, Colour], ...] = ()
    """Colour from this value on; below the first one it is ``base``."""
    base: Colour = "green"
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    stepped: bool = False
    """A value holds until the next one; else points are joined by lines."""
    texts: Mapping[int, tuple[str, Colour]] = field(default_factory=lambda: MappingProxyType({}))
    """Words instead of a number."""
    colours: Mapping[str, Colour] = field(default_factory=lambda: MappingProxyType({}))
    """By legend."""
    columns: tuple[Column, ...] = ()
    """Of a table: one for each query. The greatest value of the first one stands at the top."""

    @property
    def instant(self) -> bool:
        """Whether only the newest values are shown."""
        return self.kind in ("table", "bargauge")


@dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right, as many lines as they need."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Vertical lines at the moments at which an expression has values above 0."""

    name: str
    expr: str
    text: str
    colour: Colour


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page."""

    slug: str
    title: str
    answers: str
    rows: tuple[Row, ...]
    marks: tuple[Marks, ...]
    many_jobs: bool = False
    """Whether several jobs are shown at once."""

    @property
    def uid(self) -> str:
        """Grafana's id of it, which links name."""
        return f"rallypoint-{self.slug}"

    def panels(self) -> Iterator[Panel]:
        """All panels, in order."""
        for row in self.rows:
            yield from row.panels


@dataclass(frozen=True)
class Place:
    """A rectangle of the grid."""

    x: int
    y: int
    width: int
    height: int


def layout(dashboard: Dashboard) -> Iterator[tuple[Row | Panel, Place]]:
    """Where every heading and panel stands; a row without a title has no heading."""
    top = 0
    for row in dashboard.rows:
        if row.title:
            yield row, Place(0, top, GRID_WIDTH, 1)
            top += 1
        left = line = 0
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                left, top, line = 0, top + line, 0
            yield panel, Place(left, top, panel.width, panel.height)
            left, line = left + panel.width, max(line, panel.height)
        top += line
