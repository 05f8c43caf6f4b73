"""All dashboards of a job: asked for, drawn, written."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.evaluate import Context, scrape_interval_s
from rallypoint.ops.grafana.model import Dashboard
from rallypoint.ops.grafana.preview import chromium
from rallypoint.ops.grafana.preview.page import WIDTH_PX, Page, page
from rallypoint.ops.grafana.prometheus import Prometheus, Span

_POINTS: Final = 400
"""Of a line; more than a picture can show are of no use."""
_BROWSERS: Final = 2
"""At once."""


@dataclass(frozen=True)
class Written:
    """What was made of one dashboard."""

    page: Path
    picture: Path | None
    empty: tuple[str, ...]
    """Panels without a value."""


def choose_job(server: Prometheus, name: str | None) -> str:
    """The job that is asked for, or the only one there is. Raises `ConfigError`."""
    known = server.label_values("job", "rallypoint_generation")
    if not known:
        raise ConfigError(
            f"{server.url} has no rallypoint_generation: let it scrape the /metrics of a supervisor"
            " (docs/dashboards.md)"
        )
    if name is None and len(known) > 1:
        raise ConfigError(f"--job: {server.url} has several, say which: {', '.join(known)}")
    if name is not None and name not in known:
        raise ConfigError(f"--job {name!r}: {server.url} has {', '.join(known)}")
    return known[0] if name is None else name


def choose_boards(only: str | None) -> tuple[Dashboard, ...]:
    """The dashboards of these names, separated by commas; all without any. Raises `ConfigError`."""
    if only is None:
        return DASHBOARDS
    by_name = {board.slug: board for board in DASHBOARDS}
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"--only: no dashboard is {unknown[0]!r}; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def render(
    server: Prometheus,
    job: str,
    times_s: tuple[float, float],
    folder: Path,
    boards: tuple[Dashboard, ...] = DASHBOARDS,
) -> list[Written]:
    """Pages, and pictures where there is a Chromium; without one `ChromiumError` after the pages are
    written. ``times_s``: begin and end (unix). Raises `PrometheusError` too."""
    start_s, end_s = times_s
    scrape_s = scrape_interval_s(server, job, end_s)
    step_s = max(scrape_s, (end_s - start_s) / _POINTS)
    span = Span(start_s, end_s, step_s)
    pages = [
        page(server, board, Context(span, None if board.many_jobs else job, scrape_s), boards)
        for board in boards
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for one in pages:
        (folder / f"{one.slug}.html").write_text(one.html, encoding="utf-8")
    program = chromium.find()

    def picture(one: Page) -> Written:
        source, target = folder / f"{one.slug}.html", folder / f"{one.slug}.png"
        chromium.screenshot(program, source, target, (WIDTH_PX, one.height_px))
        return Written(source, target, one.empty)

    with ThreadPoolExecutor(_BROWSERS) as pool:
        return list(pool.map(picture, pages))
