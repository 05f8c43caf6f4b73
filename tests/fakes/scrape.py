"""What a supervisor's /metrics says, as Prometheus would read it."""

import urllib.request
from collections.abc import Mapping

_PREFIX = "rallypoint_"


def parse(text: str) -> dict[str, float]:
    """Values by series, without the prefix ``rallypoint_``."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix(_PREFIX): float(value) for name, value in pairs}


def scrape(url: str) -> dict[str, float]:
    """Values by series of the server at this address."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own server
        return parse(answer.read().decode())


def labelled(values: Mapping[str, float], name: str) -> dict[str, float]:
    """Values of one metric with a single label, by the value of the label."""
    head = f"{name}{{"
    return {key.split('"')[1]: value for key, value in values.items() if key.startswith(head)}
