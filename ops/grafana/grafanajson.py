"""A dashboard as the JSON that Grafana imports (its schema version 39: Grafana 10.4 and newer)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rallypoint.ops.grafana.model import (
    Colour,
    Column,
    Dashboard,
    Marks,
    Panel,
    Place,
    Query,
    Row,
    layout,
)

SCHEMA_VERSION: Final = 39
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


def text(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(document(dashboard), indent=1, ensure_ascii=False) + "\n"


def document(dashboard: Dashboard) -> Json:
    """The dashboard as Grafana reads it."""
    places = enumerate(layout(dashboard), 1)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.answers,
        "tags": ["rallypoint"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "templating": {"list": [_source_variable(), _job_variable(dashboard.many_jobs)]},
        "annotations": {"list": [_annotation(marks) for marks in dashboard.marks]},
        "panels": [
            _heading(number, what, place) if isinstance(what, Row) else _panel(number, what, place)
            for number, (what, place) in places
        ],
    }


def _links() -> Json:
    """From each dashboard to the others, with job and time range kept."""
    return {
        "type": "dashboards",
        "title": "rallypoint",
        "tags": ["rallypoint"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _source_variable() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "current": {},
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _job_variable(many: bool) -> Json:
    query = "label_values(rallypoint_generation, job)"
    return {
        "type": "query",
        "name": "job",
        "label": "Job",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "job"},
        "hide": 0,
        "includeAll": many,
        "multi": many,
        "current": {"text": "All", "value": "$__all"} if many else {},
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _annotation(marks: Marks) -> Json:
    return {
        "name": marks.name,
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": marks.colour,
        "expr": marks.expr,
        "titleFormat": marks.name,
        "textFormat": marks.text,
        "tagKeys": "cause",
        "useValueForTime": False,
    }


def _heading(number: int, row: Row, place: Place) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": _grid(place),
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: Place) -> Json:
    overrides = [
        _override("byName", name, _fixed(colour)) for name, colour in panel.colours.items()
    ]
    if panel.kind == "table":
        overrides += [
            _override("byName", query.legend, _column(column))
            for query, column in zip(panel.queries, panel.columns, strict=True)
        ]
    found: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.answers,
        "datasource": _SOURCE,
        "gridPos": _grid(place),
        "targets": [_target(panel, query, at) for at, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": overrides},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind == "table":
        found["transformations"] = list(_transformations(panel.queries))
        worst = {"displayName": panel.queries[0].legend, "desc": True}
        found["options"] = {**_OPTIONS["table"], "sortBy": [worst]}
    return found


def _grid(place: Place) -> Json:
    return {"x": place.x, "y": place.y, "w": place.width, "h": place.height}


def _target(panel: Panel, query: Query, at: int) -> Json:
    return {
        "refId": _ref(at),
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": panel.instant,
        "range": not panel.instant,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _ref(at: int) -> str:
    return chr(ord("A") + at)


def _defaults(panel: Panel) -> Json:
    found: Json = {
        "unit": panel.unit,
        "mappings": _mappings(panel.texts),
        "thresholds": _thresholds(panel.base, panel.thresholds),
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "noValue": "none",
    }
    bounds = {"decimals": panel.decimals, "min": panel.minimum, "max": panel.maximum}
    found |= {name: value for name, value in bounds.items() if value is not None}
    if panel.kind == "timeseries":
        found["custom"] = {
            "drawStyle": "line",
            "lineInterpolation": "stepAfter" if panel.stepped else "linear",
            "lineWidth": 0 if panel.stacked else 2,
            "fillOpacity": 70 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return found


def _thresholds(base: Colour, steps: Iterable[tuple[float, Colour]]) -> Json:
    above = [{"color": colour, "value": value} for value, colour in steps]
    return {"mode": "absolute", "steps": [{"color": base, "value": None}, *above]}


def _mappings(texts: Mapping[int, tuple[str, Colour]]) -> list[Json]:
    if not texts:
        return []
    options = {
        str(value): {"text": shown, "color": colour, "index": index}
        for index, (value, (shown, colour)) in enumerate(texts.items())
    }
    return [{"type": "value", "options": options}]


def _override(matcher: str, name: str, properties: list[Json]) -> Json:
    return {"matcher": {"id": matcher, "options": name}, "properties": properties}


def _fixed(colour: Colour) -> list[Json]:
    return [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}]


def _column(column: Column) -> list[Json]:
    found: list[Json] = [{"id": "unit", "value": column.unit}]
    if column.decimals is not None:
        found.append({"id": "decimals", "value": column.decimals})
    if column.texts:
        found.append({"id": "mappings", "value": _mappings(column.texts)})
    if column.thresholds or column.texts:
        found += [
            {"id": "thresholds", "value": _thresholds("text", column.thresholds)},
            {"id": "custom.cellOptions", "value": {"type": "color-text"}},
        ]
    return found


def _transformations(queries: Iterable[Query]) -> Iterable[Json]:
    """One row for each job, the columns named by the legends, without the time."""
    names = {f"Value #{_ref(at)}": query.legend for at, query in enumerate(queries)}
    yield {"id": "merge", "options": {}}
    yield {
        "id": "organize",
        "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": names},
    }


_REDUCED: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: Final[Mapping[str, Json]] = {
    "stat": {
        "reduceOptions": _REDUCED,
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "vertical",
        "textMode": "auto",
        "wideLayout": True,
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "bargauge": {
        "reduceOptions": _REDUCED,
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
        "minVizHeight": 10,
        "minVizWidth": 0,
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}
