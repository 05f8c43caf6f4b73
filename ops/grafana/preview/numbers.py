"""Values as people read them, and where an axis has its marks."""

import math
from datetime import UTC, datetime
from typing import Final

from rallypoint.ops.grafana.model import Unit

_SECONDS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_COUNTS: Final = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))
_BYTES: Final = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_TIME_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400),
)


def shown(value: float, unit: Unit, decimals: int | None = None) -> str:
    """A value with its unit. Without ``decimals``: three digits."""
    match unit:
        case "s":
            return _scaled(value, _SECONDS, " ", decimals)
        case "percentunit":
            return f"{_digits(100.0 * value, decimals)} %"
        case "bytes":
            return _scaled(value, _BYTES, " ", decimals)
        case "Bps":
            return f"{_scaled(value, _BYTES, ' ', decimals)}/s"
        case "cps":
            return f"{_scaled(value, _COUNTS, '', decimals)} /s"
        case "short":
            return _scaled(value, _COUNTS, "", decimals)
        case "none":
            return _digits(value, decimals)


def _scaled(
    value: float, scales: tuple[tuple[float, str], ...], between: str, decimals: int | None
) -> str:
    for scale, name in scales:
        if abs(value) >= scale:
            whole = scale == 1.0 and value == int(value)
            places = decimals if scale == 1.0 or decimals is None else max(decimals, 1)
            return f"{_digits(value / scale, 0 if whole else places)}{between}{name}"
    if value == 0.0:
        return "0"
    scale, name = scales[-1]
    return f"{_digits(value / scale, decimals)}{between if name else ''}{name}"


def _digits(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}"
    return f"{value:.3g}" if abs(value) < 1000.0 else f"{value:,.0f}"


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from ``low`` or below it to ``high`` or above it; ``whole``: none
    between whole numbers."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(
        float(whole),
        next(power * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if power * factor >= raw),
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def time_ticks(start_s: float, end_s: float, count: int) -> list[tuple[float, str]]:
    """At most ``count`` + 1 round moments (unix seconds), each as local time."""
    length_s = end_s - start_s
    step_s = next((s for s in _TIME_STEPS_S if length_s / s <= count), _TIME_STEPS_S[-1])
    offset = datetime.fromtimestamp(start_s, UTC).astimezone().utcoffset()
    offset_s = 0.0 if offset is None else offset.total_seconds()
    first = math.ceil((start_s + offset_s) / step_s)
    last = math.floor((end_s + offset_s) / step_s)
    moments = (number * step_s - offset_s for number in range(first, last + 1))
    form = "%H:%M:%S" if step_s < 60 else "%H:%M" if step_s < 86400 else "%d %b"
    return [(s, f"{datetime.fromtimestamp(s, UTC).astimezone():{form}}") for s in moments]
