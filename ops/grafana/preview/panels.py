"""Each kind of panel as HTML."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rallypoint.ops.grafana.evaluate import Answer
from rallypoint.ops.grafana.model import Colour, Column, Panel
from rallypoint.ops.grafana.preview import chart, numbers
from rallypoint.ops.grafana.preview.chart import Mark
from rallypoint.ops.grafana.preview.colours import HEX, by_threshold
from rallypoint.ops.grafana.prometheus import Span

TITLE_PX: Final = 32
LEGEND_PX: Final = 26
PADDING_PX: Final = 10
TEXT: Final[Colour] = "text"
_VALUE_PX: Final = 44
_LETTER: Final = 0.7
"""Width of a letter over its size, in bold."""
_SWATCH_PX: Final = 34
_LEGEND_LETTER_PX: Final = 7
_MOST_ROWS: Final = 3
"""Of a legend."""
_BAR_PX: Final = 44
"""Height of a bar, with its distance to the next, where there is room."""


@dataclass(frozen=True)
class Drawn:
    """A panel and what Prometheus said."""

    panel: Panel
    answers: Sequence[Answer]
    marks: Sequence[Mark]
    span: Span


def content(drawn: Drawn, width: int, height: int) -> str:
    """What stands below the title of a panel of this size (pixels)."""
    inner = (width - 2 * PADDING_PX, height - TITLE_PX - PADDING_PX)
    if not any(answer.last is not None for answer in drawn.answers):
        why = next((q.may_be_empty for q in drawn.panel.queries if q.may_be_empty), "")
        return f'<div class="none">no value: {escape(why or drawn.panel.answers)}</div>'
    match drawn.panel.kind:
        case "stat":
            return _stat(drawn, inner)
        case "timeseries":
            return _timeseries(drawn, inner)
        case "bargauge":
            return _bars(drawn, inner[1])
        case "table":
            return _table(drawn)


def _words(panel: Panel | Column, value: float, base: Colour) -> tuple[str, Colour]:
    """A value, in words where there are some, and its colour."""
    if value in panel.texts:
        return panel.texts[int(value)]
    text = numbers.shown(value, panel.unit, panel.decimals)
    return text, by_threshold(value, base, panel.thresholds)


def _stat(drawn: Drawn, inner: tuple[int, int]) -> str:
    """Numbers side by side, all of one size."""
    panel = drawn.panel
    values = [(answer, answer.last) for answer in drawn.answers if answer.last is not None]
    shown = [(answer, *_words(panel, last, panel.base)) for answer, last in values]
    width = inner[0] // len(shown) - 8
    longest = max(len(text) for _, text, _ in shown)
    size = min(_VALUE_PX, int(width / (_LETTER * longest)))
    cells = []
    for answer, text, colour in shown:
        code, points = HEX[panel.colours.get(answer.name, colour)], answer.series.finite
        spark = chart.sparkline(points, drawn.span, code, (width, inner[1] // 3))
        cells.append(
            f'<div class="cell" style="width:{width}px"><div class="name">{escape(answer.name)}</div>'
            f'<div class="value" style="font-size:{size}px;color:{code}">{escape(text)}</div>'
            f"{'' if panel.texts else spark}</div>"
        )
    return f'<div class="stat" style="height:{inner[1]}px">{"".join(cells)}</div>'


def _timeseries(drawn: Drawn, inner: tuple[int, int]) -> str:
    lines = chart.lines(drawn.panel, drawn.answers)
    widths = (_SWATCH_PX + _LEGEND_LETTER_PX * len(line.name) for line in lines)
    below = LEGEND_PX * min(_MOST_ROWS, math.ceil(sum(widths) / inner[0]))
    size = (inner[0], inner[1] - below)
    svg = chart.draw(drawn.panel, lines, drawn.marks, drawn.span, size)
    names = "".join(
        f'<span><i style="background:{line.colour}"></i>{escape(line.name)}</span>'
        for line in lines
    )
    return f'{svg}<div class="legend" style="height:{below}px">{names}</div>'


def _bars(drawn: Drawn, height: int) -> str:
    panel = drawn.panel
    values = [(answer.name, answer.last) for answer in drawn.answers if answer.last is not None]
    longest = panel.maximum or max(value for _, value in values) or 1.0
    one = min(_BAR_PX, height // len(values))
    rows = []
    for name, value in values:
        text, colour = _words(panel, value, panel.base)
        colour = panel.colours.get(name, colour)
        share = 100.0 * min(1.0, max(0.0, value / longest))
        rows.append(
            f'<div class="bar" style="height:{one}px"><span class="name">{escape(name)}</span><span class="track">'
            f'<i style="height:{one - 10}px;width:{share:.1f}%;background:{HEX[colour]}"></i></span>'
            f'<span class="number" style="color:{HEX[colour]}">{escape(text)}</span></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def _table(drawn: Drawn) -> str:
    """A row for each job, the worst first, as in Grafana."""
    panel = drawn.panel
    columns = list(zip(panel.queries, panel.columns, strict=True))
    rows: dict[str, dict[str, float]] = {}
    for answer in drawn.answers:
        if answer.last is not None:
            row = rows.setdefault(answer.series.labels.get("job", ""), {})
            row[answer.query.legend] = answer.last
    head = "".join(f"<th>{escape(query.legend)}</th>" for query, _ in columns)
    body = []
    first = panel.queries[0].legend
    for job, row in sorted(rows.items(), key=lambda item: (-item[1].get(first, 0.0), item[0])):
        cells = [f"<td>{escape(job)}</td>"]
        for query, column in columns:
            value = row.get(query.legend)
            text, colour = _words(column, value, "text") if value is not None else ("-", TEXT)
            cells.append(f'<td style="color:{HEX[colour]}">{escape(text)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr><th>job</th>{head}</tr>{''.join(body)}</table>"
