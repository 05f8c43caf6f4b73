"""A Prometheus server, asked over HTTP. Standard library; never through a proxy."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.daemon.shared.errors import RallypointError

_ANSWER_S: Final = 30.0


class PrometheusError(RallypointError):
    """The server does not answer, or refuses an expression."""


@dataclass(frozen=True)
class Series:
    """Values of one set of labels, in the order of time."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]
    """(unix seconds, value); a value may be NaN or infinite."""

    @property
    def finite(self) -> tuple[tuple[float, float], ...]:
        """The points that can be drawn."""
        return tuple(point for point in self.points if math.isfinite(point[1]))


@dataclass(frozen=True)
class Span:
    """A range of time and the distance of the points that are asked for."""

    start_s: float
    end_s: float
    step_s: float


class Prometheus:
    """One server. Every method raises `PrometheusError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise PrometheusError(
                f"{url!r} is no address of a Prometheus server; give one like http://127.0.0.1:9090"
            )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def range(self, expr: str, span: Span) -> list[Series]:
        """Values of an expression over time."""
        result = self._ask(
            "query_range", query=expr, start=span.start_s, end=span.end_s, step=span.step_s
        )
        return [_series(one["metric"], one["values"]) for one in result["result"]]

    def instant(self, expr: str, at_s: float) -> list[Series]:
        """Values of an expression at one moment."""
        result = self._ask("query", query=expr, time=at_s)
        return [_series(one["metric"], [one["value"]]) for one in result["result"]]

    def samples(self, expr: str, at_s: float) -> list[Series]:
        """What was scraped: of a selector with a window."""
        result = self._ask("query", query=expr, time=at_s)
        return [_series(one["metric"], one["values"]) for one in result["result"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        """The values that a label of these series has, in order."""
        found: list[str] = self._ask(f"label/{label}/values", **{"match[]": selector})
        return sorted(found)

    def scrape_errors(self) -> list[str]:
        """Why targets could not be scraped the last time."""
        found = (target["lastError"] for target in self._ask("targets")["activeTargets"])
        return [error for error in found if error]

    def _ask(self, path: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(url, timeout=_ANSWER_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()  # a refused expression comes with its reason
        except OSError as error:
            raise PrometheusError(
                f"{self.url}: no answer ({error}); is this the address of a Prometheus server?"
            ) from error
        return self._data(body, parameters)

    def _data(self, body: bytes, parameters: Mapping[str, object]) -> Any:
        try:
            document = json.loads(body)
            status = document["status"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrometheusError(
                f"{self.url}: the answer is not that of a Prometheus server: {body[:80]!r}"
            ) from error
        if status != "success":
            raise PrometheusError(
                f"{self.url}: {document.get('error', 'refused')}; asked: {dict(parameters)}"
            )
        return document["data"]


def _series(labels: Mapping[str, str], values: list[list[Any]]) -> Series:
    return Series(labels, tuple((float(at), float(value)) for at, value in values))
