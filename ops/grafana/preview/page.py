"""A dashboard as one HTML page that fetches nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Final

from rallypoint.ops.grafana import evaluate
from rallypoint.ops.grafana.evaluate import Context
from rallypoint.ops.grafana.model import GRID_WIDTH, Dashboard, Panel, Place, Row, layout
from rallypoint.ops.grafana.preview import panels
from rallypoint.ops.grafana.preview.chart import Mark
from rallypoint.ops.grafana.preview.colours import HEX
from rallypoint.ops.grafana.preview.panels import Drawn
from rallypoint.ops.grafana.prometheus import Prometheus

WIDTH_PX: Final = 1416
_MARGIN_PX: Final = 12
_HEAD_PX: Final = 62
_CELL_PX: Final = 38
_GAP_PX: Final = 8
_COLUMN_PX: Final = (WIDTH_PX - 2 * _MARGIN_PX + _GAP_PX) / GRID_WIDTH

_STYLE: Final = """
body{margin:0;background:#111217;color:#ccccdc;font:13px 'Inter','DejaVu Sans',sans-serif}
header{position:absolute;left:12px;right:12px;top:0;height:54px;display:flex;align-items:center;gap:18px}
h1{font-size:18px;margin:0;font-weight:600}a{color:#6e9fff;text-decoration:none}
header .right{margin-left:auto;color:#9a9aab}header i{display:inline-block;width:9px;height:9px;
border-radius:5px;margin:0 5px 0 12px}
h2{position:absolute;margin:0;font-size:14px;font-weight:600;line-height:30px}
section{position:absolute;background:#181b1f;border:1px solid #2b2e35;border-radius:3px;overflow:hidden;
box-sizing:border-box;padding:0 10px}
h3{margin:0;font-size:13px;font-weight:600;line-height:32px;white-space:nowrap}
svg{display:block}svg text{fill:#9a9aab;font-size:11px}.grid{stroke:#2b2e35;stroke-width:1}
.mark{stroke-opacity:.85;stroke-width:1.3}
.legend{line-height:26px;overflow:hidden;font-size:12px}
.legend span{margin-right:14px;white-space:nowrap;display:inline-block}.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;
margin:0 6px 3px 0}
.stat{display:flex;justify-content:space-around}.cell{position:relative;text-align:center}
.cell .name{color:#9a9aab;font-size:13px}.cell .value{font-weight:600;line-height:58px;white-space:nowrap}
.spark{position:absolute;bottom:0;left:0}
.none{color:#9a9aab;text-align:center;padding:26px 10px}
.bar{display:flex;align-items:center;gap:10px}.bar .name{width:92px;text-align:right;color:#9a9aab}
.bar .track{flex:1;background:#22252b;border-radius:2px}.bar .track i{display:block;
border-radius:2px;min-width:1px}.bar .number{width:78px;font-weight:600}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:7px 10px;border-bottom:1px solid #2b2e35}
th{color:#9a9aab;font-weight:500}td{font-weight:600}
"""


@dataclass(frozen=True)
class Page:
    """What is written for one dashboard."""

    slug: str
    html: str
    height_px: int
    empty: tuple[str, ...]
    """Titles of the panels that have no value."""


def page(
    server: Prometheus, board: Dashboard, context: Context, boards: Sequence[Dashboard]
) -> Page:
    """Ask for everything, and draw it. Raises `PrometheusError`."""
    marks = _marks(server, board, context)
    placed = list(layout(board))
    parts, empty = [], []
    for what, place in placed:
        if isinstance(what, Row):
            parts.append(f'<h2 style="{_box(place)}">{escape(what.title)}</h2>')
            continue
        answers = evaluate.answers(server, what, context)
        if all(answer.last is None for answer in answers):
            empty.append(what.title)
        parts.append(_section(Drawn(what, answers, marks, context.span), place))
    height = _HEAD_PX + _CELL_PX * max(place.y + place.height for _, place in placed) + _MARGIN_PX
    html = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        f" style-src 'unsafe-inline'\"><title>{escape(board.title)}</title>"
        f"<style>{_STYLE}body{{height:{height}px;width:{WIDTH_PX}px;position:relative}}</style>"
        f"{_header(board, context, boards)}{''.join(parts)}</html>\n"
    )
    return Page(board.slug, html, height, tuple(empty))


def _marks(server: Prometheus, board: Dashboard, context: Context) -> list[Mark]:
    return [
        Mark(at_s, text, HEX[marks.colour])
        for marks in reversed(board.marks)  # the first ones above the others
        for at_s, text in evaluate.moments(server, marks, context)
    ]


def _size(place: Place) -> tuple[int, int]:
    return round(place.width * _COLUMN_PX) - _GAP_PX, place.height * _CELL_PX - _GAP_PX


def _box(place: Place) -> str:
    left, top = _MARGIN_PX + round(place.x * _COLUMN_PX), _HEAD_PX + place.y * _CELL_PX
    width, height = _size(place)
    return f"left:{left}px;top:{top}px;width:{width}px;height:{height}px"


def _section(drawn: Drawn, place: Place) -> str:
    panel: Panel = drawn.panel
    return (
        f'<section style="{_box(place)}"><h3 title="{escape(panel.answers)}">{escape(panel.title)}'
        f"</h3>{panels.content(drawn, *_size(place))}</section>"
    )


def _header(board: Dashboard, context: Context, boards: Sequence[Dashboard]) -> str:
    links = " ".join(
        f'<a href="{other.slug}.html">{escape(other.slug)}</a>'
        for other in boards
        if other != board
    )
    marks = "".join(
        f'<i style="background:{HEX[marks.colour]}"></i>{escape(marks.name)}'
        for marks in board.marks
    )
    start, end = (
        datetime.fromtimestamp(at_s, UTC).astimezone()
        for at_s in (context.span.start_s, context.span.end_s)
    )
    job = context.job or "all jobs"
    return (
        f"<header><h1>{escape(board.title)}</h1><b>{escape(job)}</b>{links}"
        f'<span class="right">{marks} &nbsp; {start:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}</span></header>'
    )
