"""Pieces of the expressions. The convention: Prometheus's label ``job`` is the training job, ``instance`` the node.

What concerns the whole job is the same on each of its nodes, so the greatest is taken; what each node counts of
its own is added up.
"""

from collections.abc import Mapping
from typing import Final

LOSSES: Final = "worker_lost|node_lost|hang"
"""Causes of a change where somebody was lost."""


def select(name: str, *matchers: str, window: str = "") -> str:
    """The series of a metric (without its prefix) of the chosen jobs."""
    inside = ", ".join(('job=~"$job"', *matchers))
    return f"rallypoint_{name}{{{inside}}}{window}"


def whole(name: str, *matchers: str, by: str = "job") -> str:
    """A figure that every node of a job shows alike."""
    return f"max by ({by}) ({select(name, *matchers)})"


def total(name: str, *matchers: str, by: str = "job") -> str:
    """A figure that every node shows of its own part."""
    return f"sum by ({by}) ({select(name, *matchers)})"


def rate(name: str, *matchers: str, by: str = "job", window: str = "$__rate_interval") -> str:
    """By how much the counters of all nodes grow a second."""
    return f"sum by ({by}) (rate({select(name, *matchers, window=f'[{window}]')}))"


def whole_rate(name: str, *matchers: str, window: str = "$__rate_interval") -> str:
    """By how much a counter grows a second that every node keeps for the whole job."""
    return f"max by (job) (rate({select(name, *matchers, window=f'[{window}]')}))"


def mean(name: str, *matchers: str, by: str = "job", window: str = "$__rate_interval") -> str:
    """The mean of what a histogram or summary has taken."""
    grown = (rate(f"{name}_{part}", *matchers, by=by, window=window) for part in ("sum", "count"))
    return " / ".join(grown)


def quantile(q: float, name: str, *matchers: str, by: str = "job", window: str = "$__range") -> str:
    """A quantile of what a histogram has taken, over all nodes."""
    buckets = rate(f"{name}_bucket", *matchers, by=f"{by}, le", window=window)
    return f"histogram_quantile({q}, {buckets})"


def risen(name: str, *matchers: str, by: str) -> str:
    """Greater than 0 at the one step at which a counter has risen."""
    now = whole(name, *matchers, by=by)
    before = f"max by ({by}) ({select(name, *matchers)} offset $__interval)"
    return f"({now} - {before}) > 0"


def least(name: str, *matchers: str, by: str = "job") -> str:
    """Of a figure that every node shows of its own view, the least."""
    return f"min by ({by}) ({select(name, *matchers)})"


def risen_by(name: str, *matchers: str, by: str = "job", window: str = "$__range") -> str:
    """By how much the counters of all nodes grew."""
    return f"sum by ({by}) (increase({select(name, *matchers, window=f'[{window}]')}))"


def share(name: str, matcher: str, *, by: str = "job", window: str = "$__rate_interval") -> str:
    """The part of a counter's growth that has this label value."""
    return f"{rate(name, matcher, by=by, window=window)} / {rate(name, by=by, window=window)}"


def coded(name: str, label: str, codes: Mapping[int, str]) -> str:
    """Of gauges of which exactly one is 1: its number. Of several nodes the greatest."""
    matchers = {code: f'{label}="{value}"' for code, value in codes.items()}
    parts = (f"{code} * ({select(name, matcher)} == 1)" for code, matcher in matchers.items())
    return f"max by (job) ({' or '.join(parts)})"
