"""Lines and areas over time, as SVG."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rallypoint.ops.grafana.evaluate import Answer
from rallypoint.ops.grafana.model import Panel
from rallypoint.ops.grafana.preview import numbers
from rallypoint.ops.grafana.preview.colours import HEX, PALETTE
from rallypoint.ops.grafana.prometheus import Span

_LEFT: Final = 62
_BELOW: Final = 22
_ABOVE: Final = 8
_RIGHT: Final = 10
_TICK_PX: Final = 34
_TIME_TICK_PX: Final = 72
_TIME_PX: Final = 56
"""Width of the text of a moment."""
_GAP_STEPS: Final = 1.5
"""Points further apart than this many steps are not joined."""

Point = tuple[float, float]
"""Unix seconds, value."""


@dataclass(frozen=True)
class Line:
    """What is drawn of one answer."""

    name: str
    colour: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """A vertical line."""

    at_s: float
    text: str
    colour: str


@dataclass(frozen=True)
class Frame:
    """Where values are on the picture."""

    span: Span
    low: float
    high: float
    width: int
    height: int

    def x(self, at_s: float) -> float:
        """Pixels from the left."""
        share = (at_s - self.span.start_s) / (self.span.end_s - self.span.start_s)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.height - _BELOW - share * (self.height - _BELOW - _ABOVE)


def lines(panel: Panel, answers: Sequence[Answer]) -> list[Line]:
    """The answers that have values, with their colours, and stacked on each other where the panel says
    so. Of stacked ones, those that are 0 all the time are left out."""
    found: list[Line] = []
    sums: dict[float, float] = {}
    for answer in answers:
        points: Sequence[Point] = answer.series.finite
        if not points or (panel.stacked and not any(value for _, value in points)):
            continue
        if panel.stacked:
            for at_s, value in points:
                sums[at_s] = sums.get(at_s, 0.0) + value
            points = [(at_s, sums[at_s]) for at_s, _ in points]
        fixed = panel.colours.get(answer.name)
        colour = PALETTE[len(found) % len(PALETTE)] if fixed is None else HEX[fixed]
        found.append(Line(answer.name, colour, points))
    return found


def draw(
    panel: Panel, drawn: Sequence[Line], marks: Sequence[Mark], span: Span, size: tuple[int, int]
) -> str:
    """The whole picture."""
    values = [value for line in drawn for _, value in line.points]
    low, high = _bounds(panel, values)
    count = max(2, (size[1] - _BELOW) // _TICK_PX)
    marked = numbers.ticks(low, high, count, whole=panel.decimals == 0)
    frame = Frame(span, min(marked[0], low), max(marked[-1], high), *size)
    parts = [
        *_axes(panel, frame, marked),
        *(_area(panel, frame, line) for line in reversed(drawn) if panel.stacked),
        *(_line(panel, frame, line) for line in drawn if not panel.stacked),
        *_thresholds(panel, frame),
        *_marks(frame, marks),
    ]
    return f'<svg width="{size[0]}" height="{size[1]}">{"".join(parts)}</svg>'


def sparkline(points: Sequence[Point], span: Span, colour: str, size: tuple[int, int]) -> str:
    """The course of a number, behind it."""
    values = [value for _, value in points]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    width, height = size
    length_s = span.end_s - span.start_s

    def place(point: Point) -> str:
        x = width * (point[0] - span.start_s) / length_s
        share = float(high > 0.0) / 2 if high == low else (point[1] - low) / (high - low)
        return f"{x:.1f},{height - 2 - share * (height - 4):.1f}"

    course = " ".join(map(place, points))
    left, right = (width * (points[at][0] - span.start_s) / length_s for at in (0, -1))
    return (
        f'<svg class="spark" width="{width}" height="{height}">'
        f'<polygon points="{left:.1f},{height} {course} {right:.1f},{height}" fill="{colour}"'
        f' fill-opacity=".18"/><polyline points="{course}" fill="none" stroke="{colour}"'
        ' stroke-opacity=".7"/></svg>'
    )


def _bounds(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if panel.stacked:
        low = 0.0
    low = low if panel.minimum is None else panel.minimum
    high = high if panel.maximum is None else panel.maximum
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _axes(panel: Panel, frame: Frame, marked: Sequence[float]) -> Iterator[str]:
    right, bottom = frame.width - _RIGHT, frame.height - _BELOW
    for value in marked:
        y = frame.y(value)
        text = numbers.shown(value, panel.unit, panel.decimals if panel.unit == "none" else None)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    count = max(2, (right - _LEFT) // _TIME_TICK_PX)
    for at_s, text in numbers.time_ticks(frame.span.start_s, frame.span.end_s, count):
        x = frame.x(at_s)
        yield f'<path class="grid" d="M{x:.1f} {_ABOVE}V{bottom}"/>'
        middle = min(x, frame.width - _TIME_PX / 2)  # the last one stays whole
        yield f'<text x="{middle:.1f}" y="{frame.height - 6}" text-anchor="middle">{text}</text>'


def _pieces(line: Line, step_s: float) -> Iterator[list[Point]]:
    """The points, cut where some are missing."""
    piece: list[Point] = []
    for point in line.points:
        if piece and point[0] - piece[-1][0] > _GAP_STEPS * step_s:
            yield piece
            piece = []
        piece.append(point)
    if piece:
        yield piece


def _path(frame: Frame, piece: Sequence[Point], stepped: bool) -> str:
    (first_s, first), *rest = piece
    words = [f"{frame.x(first_s):.1f} {frame.y(first):.1f}"]
    for at_s, value in rest:
        x, y = frame.x(at_s), frame.y(value)
        words.append(f"H{x:.1f}V{y:.1f}" if stepped else f"L{x:.1f} {y:.1f}")
    return "".join(words)


def _area(panel: Panel, frame: Frame, line: Line) -> str:
    """From the axis up to the line; what is stacked below is drawn over it later."""
    bottom = frame.y(0.0)
    return "".join(
        f'<path d="M{frame.x(piece[0][0]):.1f} {bottom:.1f}L{_path(frame, piece, panel.stepped)}'
        f'V{bottom:.1f}Z" fill="{line.colour}"><title>{escape(line.name)}</title></path>'
        for piece in _pieces(line, frame.span.step_s)
    )


def _line(panel: Panel, frame: Frame, line: Line) -> str:
    return "".join(
        f'<path d="M{_path(frame, piece, panel.stepped)}" fill="none" stroke="{line.colour}"'
        f' stroke-width="1.8" stroke-linecap="round"><title>{escape(line.name)}</title></path>'
        for piece in _pieces(line, frame.span.step_s)
    )


def _thresholds(panel: Panel, frame: Frame) -> Iterator[str]:
    for value, colour in panel.thresholds:
        if frame.low < value < frame.high:
            yield (
                f'<path d="M{_LEFT} {frame.y(value):.1f}H{frame.width - _RIGHT}"'
                f' stroke="{HEX[colour]}" stroke-dasharray="6 4" stroke-opacity=".7"/>'
            )


def _marks(frame: Frame, marks: Sequence[Mark]) -> Iterator[str]:
    """Those of one scrape stand at one moment: the dashes of each other one fill the gaps, so that none hides
    another."""
    bottom, there = frame.height - _BELOW, Counter[float]()
    for mark in marks:
        x, later = frame.x(mark.at_s), there[mark.at_s]
        there[mark.at_s] += 1
        top, left = _ABOVE + 3 * (later % 2), x - 4 + 5 * later
        yield (
            f'<g class="mark" stroke="{mark.colour}" fill="{mark.colour}">'
            f"<title>{escape(mark.text)}</title>"
            f'<path d="M{x:.1f} {top}V{bottom}" stroke-dasharray="3 3"/>'
            f'<path d="M{left:.1f} {bottom + 6}h8l-4 -6Z"/></g>'
        )
