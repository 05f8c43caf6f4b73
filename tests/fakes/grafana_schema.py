"""Grafana's own schema of dashboards, as its makers publish it (the package grafana-foundation-sdk), held
against a dashboard's JSON.

The package reads a dashboard without complaint whatever is in it: so the types of its classes are compared
with the document, field by field.
"""

import enum
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grafana_foundation_sdk.models import bargauge, dashboard, prometheus, stat, table, timeseries

PANELS = {"stat": stat, "timeseries": timeseries, "bargauge": bargauge, "table": table}
"""The schema of each kind of panel that we use."""
OUTSIDE = {
    "AnnotationQuery": {"titleFormat", "textFormat", "tagKeys", "useValueForTime"},
    "VariableModel": {"definition"},
}
"""Fields that the schema leaves out: of an annotation those of its data source (Grafana's plugin for Prometheus
reads and edits them by these names), of a variable what Grafana writes beside its query."""

Json = Mapping[str, Any]


def differences(document: Json) -> list[str]:
    """Where a dashboard is none by Grafana's schema: unknown fields, and values of another type."""
    return list(_against(document, dashboard.Dashboard, "dashboard"))


def _against(value: Any, hint: Any, at: str, panel: str = "") -> Iterator[str]:
    """``panel``: the kind of the panel that this is a part of."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (object, Any):
        return
    if origin in (Union, types.UnionType):
        yield from _one_of(value, inner, at, panel)
    elif origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _against(item, inner[0], f"{at}[{number}]", panel)
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _against(item, inner[1], f"{at}.{key}", panel)
    elif hasattr(hint, "from_json") and isinstance(value, dict):
        yield from _model(value, hint, at, panel)
    elif not _is(value, hint, inner):
        yield f"{at}: {value!r} is no {getattr(hint, '__name__', hint)}"


def _is(value: Any, hint: Any, inner: tuple[Any, ...]) -> bool:
    if get_origin(hint) is Literal:
        return value in inner
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return any(value == member.value for member in hint)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _one_of(value: Any, hints: tuple[Any, ...], at: str, panel: str) -> Iterator[str]:
    if value is None and type(None) in hints:
        return
    if dashboard.RowPanel in hints:
        hints = (dashboard.RowPanel if value.get("type") == "row" else dashboard.Panel,)
    found = [list(_against(value, x, at, panel)) for x in hints if x is not type(None)]
    yield from min(found, key=len)


def _model(value: Json, model: type, at: str, panel: str) -> Iterator[str]:
    fields = dict(_fields(model))
    if model is dashboard.Panel:
        panel = value.get("type", "")
        if panel not in PANELS:
            yield f"{at}: panels of type {panel!r} are not in use here"
            return
        fields |= {"options": PANELS[panel].Options, "targets": list[prometheus.Dataquery]}
    elif model is dashboard.FieldConfig and panel in ("timeseries", "table"):
        fields["custom"] = PANELS[panel].FieldConfig
    for key, item in value.items():
        if key in fields:
            yield from _against(item, fields[key], f"{at}.{key}", panel)
        elif key not in OUTSIDE.get(model.__name__, ()):
            yield f"{at}.{key}: {model.__name__} has no such field"


@cache
def _fields(model: type) -> Mapping[str, Any]:
    """Types by the name in JSON. What ``to_json`` does with a mark on each attribute tells these names."""
    hints: dict[str, Any] = {}
    for base in reversed(model.__mro__):
        if "__annotations__" in vars(base):
            hints |= get_type_hints(base)
    marked: Any = object.__new__(model)
    for name in hints:
        setattr(marked, name, (model, name))
    to_json: Callable[[], dict[str, Any]] = marked.to_json
    return {
        key: hints[mark[1]]
        for key, mark in to_json().items()
        if isinstance(mark, tuple) and mark[0] is model
    }
