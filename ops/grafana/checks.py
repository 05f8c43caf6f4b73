"""What Grafana needs of a dashboard's JSON, checked without Grafana.

Types by structs that refuse what they do not know; what types cannot say by `problems`. The names are those of
Grafana's own schema of dashboards.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, Final, Literal

import msgspec

from rallypoint.ops.grafana.model import GRID_WIDTH

_UNITS: Final = {"none", "short", "s", "percentunit", "bytes", "Bps", "cps"}
_VARIABLES: Final = {"$job", "$__interval", "$__rate_interval", "$__range"}
_MAX_UID: Final = 40
_OLDEST_SCHEMA: Final = 36


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Knows all of its fields."""


class Source(Strict):
    """Where data comes from."""

    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Grid(Strict):
    """Place of a panel."""

    x: int
    y: int
    w: int
    h: int


class Target(Strict):
    """One query of a panel."""

    refId: str
    datasource: Source
    editorMode: Literal["code"]
    expr: str
    legendFormat: str
    instant: bool
    range: bool
    format: Literal["table", "time_series"]


class ThresholdStep(Strict):
    """A colour from a value on."""

    color: str
    value: float | None


class Thresholds(Strict):
    """Colours by value."""

    mode: Literal["absolute"]
    steps: list[ThresholdStep]


class Defaults(Strict):
    """How the values of a panel are shown."""

    unit: str
    mappings: list[dict[str, Any]]
    thresholds: Thresholds
    color: dict[str, str]
    noValue: str
    decimals: int | None = None
    min: float | None = None
    max: float | None = None
    custom: dict[str, Any] | None = None


class Override(Strict):
    """How some of them are shown."""

    matcher: dict[str, str]
    properties: list[dict[str, Any]]


class FieldConfig(Strict):
    """Defaults, and what differs."""

    defaults: Defaults
    overrides: list[Override]


class RowPanel(Strict, tag_field="type", tag="row"):
    """A heading."""

    id: int
    title: str
    collapsed: bool
    gridPos: Grid
    panels: list[None]


class _Drawn(Strict, tag_field="type"):
    id: int
    title: str
    description: str
    datasource: Source
    gridPos: Grid
    targets: list[Target]
    fieldConfig: FieldConfig
    options: dict[str, Any]


class Stat(_Drawn, tag="stat"):
    """Numbers."""


class TimeSeries(_Drawn, tag="timeseries"):
    """Lines over time."""


class BarGauge(_Drawn, tag="bargauge"):
    """Bars."""


class TablePanel(_Drawn, tag="table"):
    """A table."""

    transformations: list[dict[str, Any]]


class Annotation(Strict):
    """Marks on all panels."""

    name: str
    datasource: Source
    enable: bool
    hide: bool
    iconColor: str
    expr: str
    titleFormat: str
    textFormat: str
    tagKeys: str
    useValueForTime: bool


class Annotations(Strict):
    """All marks."""

    list: list[Annotation]


class Variable(Strict):
    """Something that the user chooses."""

    type: Literal["datasource", "query"]
    name: str
    label: str
    query: str | dict[str, str]
    hide: int
    includeAll: bool
    multi: bool
    current: dict[str, str]
    options: list[None]
    refresh: int
    regex: str
    datasource: Source | None = None
    definition: str = ""
    sort: int = 0


class Variables(Strict):
    """All of them."""

    list: list[Variable]


class Document(Strict):
    """A dashboard."""

    uid: str
    title: str
    description: str
    tags: list[str]
    schemaVersion: int
    editable: bool
    graphTooltip: Literal[0, 1, 2]
    refresh: str
    time: dict[str, str]
    timezone: str
    links: list[dict[str, Any]]
    templating: Variables
    annotations: Annotations
    panels: list[RowPanel | Stat | TimeSeries | BarGauge | TablePanel]


def problems(text: str | bytes) -> list[str]:
    """What is wrong with a dashboard's file; nothing when Grafana can show it."""
    try:
        board = msgspec.json.decode(text, type=Document)
    except msgspec.ValidationError as error:
        return [str(error)]
    return [*_whole(board), *_places(board), *_contents(board)]


def _whole(board: Document) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9-]+", board.uid) or len(board.uid) > _MAX_UID:
        yield f"uid {board.uid!r}: at most {_MAX_UID} of a-z, 0-9 and -"
    if board.schemaVersion < _OLDEST_SCHEMA:
        yield f"schemaVersion {board.schemaVersion} is older than {_OLDEST_SCHEMA}"
    variables = {variable.name: variable.type for variable in board.templating.list}
    if variables != {"datasource": "datasource", "job": "query"}:
        yield f"variables {variables}: a data source and a job are chosen"
    if not board.annotations.list:
        yield "no annotations"
    for annotation in board.annotations.list:
        yield from _expression(f"annotation {annotation.name!r}", annotation.expr)


def _places(board: Document) -> Iterator[str]:
    if len({panel.id for panel in board.panels}) < len(board.panels):
        yield "two panels have one id"
    for panel in board.panels:
        at = panel.gridPos
        if at.x < 0 or at.y < 0 or at.w < 1 or at.h < 1 or at.x + at.w > GRID_WIDTH:
            yield f"{panel.title!r} leaves the grid: {at}"
    for one, other in combinations(board.panels, 2):
        if _overlap(one.gridPos, other.gridPos):
            yield f"{one.title!r} and {other.title!r} overlap"


def _overlap(one: Grid, other: Grid) -> bool:
    beside = one.x + one.w <= other.x or other.x + other.w <= one.x
    apart = one.y + one.h <= other.y or other.y + other.h <= one.y
    return not (beside or apart)


def _contents(board: Document) -> Iterator[str]:
    for panel in board.panels:
        if isinstance(panel, RowPanel):
            continue
        name, defaults = repr(panel.title), panel.fieldConfig.defaults
        if not panel.title or not panel.description:
            yield f"{name}: a panel has a title, and says what it answers"
        if not panel.targets:
            yield f"{name} has no query"
        if len({target.refId for target in panel.targets}) < len(panel.targets):
            yield f"{name}: two queries have one refId"
        for target in panel.targets:
            yield from _expression(f"{name} {target.refId}", target.expr)
        if defaults.unit not in _UNITS:
            yield f"{name}: unit {defaults.unit!r} is none of {sorted(_UNITS)}"
        yield from (f"{name}: {text}" for text in _steps(defaults.thresholds.steps))


def _steps(steps: list[ThresholdStep]) -> Iterator[str]:
    if not steps or steps[0].value is not None:
        yield "the first threshold has no value"
    values = [step.value for step in steps[1:] if step.value is not None]
    if len(values) < len(steps) - 1 or values != sorted(values):
        yield f"thresholds {values} do not rise"


def _expression(where: str, expr: str) -> Iterable[str]:
    unknown = set(re.findall(r"\$\w+", expr)) - _VARIABLES
    if unknown:
        yield f"{where}: nothing fills in {sorted(unknown)}"
    if "rallypoint_" not in expr or 'job=~"$job"' not in expr:
        yield f"{where}: {expr!r} is not about the chosen job"
