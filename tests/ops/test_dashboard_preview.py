"""Pages and pictures of dashboards, from a server that answers what the test says."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.evaluate import Answer, Context, legend, scrape_interval_s
from rallypoint.ops.grafana.model import Column, Dashboard, Panel, Query, Unit
from rallypoint.ops.grafana.preview import chart, numbers, page, panels
from rallypoint.ops.grafana.preview.chart import Mark
from rallypoint.ops.grafana.preview.panels import Drawn
from rallypoint.ops.grafana.prometheus import Prometheus, PrometheusError, Series, Span
from tests.fakes.prometheus_server import Answers, Labels, prometheus_server

SPAN = Span(1000.0, 1100.0, 10.0)
NO_PROGRAMS = "/nonexistent"


@pytest.fixture
def server() -> Iterator[Answers]:
    with prometheus_server() as answers:
        answers.series["[5m]"] = [({}, "1")]
        yield answers


def series(*values: float, start_s: float = 1000.0, labels: Labels | None = None) -> Series:
    return Series(
        labels or {}, tuple((start_s + 10.0 * at, value) for at, value in enumerate(values))
    )


def panel(kind: str = "timeseries", **more: object) -> Panel:
    queries = (Query(expr="x", legend="{{job}}"),)
    return Panel(
        title="T", answers="A", kind=kind, queries=queries, width=6, height=6, **more  # type: ignore[arg-type]
    )  # fmt: skip


def answer(name: str, *values: float) -> Answer:
    return Answer(name, Query(expr="x"), series(*values))


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.0, "s", None, "0"),
        (0.0345, "s", None, "34.5 ms"),
        (0.00002, "s", None, "0.02 ms"),
        (5.0, "s", None, "5 s"),
        (5.123, "s", None, "5.12 s"),
        (90.0, "s", None, "1.5 min"),
        (7200.0, "s", None, "2 h"),
        (0.948, "percentunit", None, "94.8 %"),
        (0.000342, "percentunit", 2, "0.03 %"),
        (2048.0, "bytes", None, "2 KiB"),
        (3.0 * 2**20, "Bps", None, "3 MiB/s"),
        (12345.0, "short", None, "12.3 k"),
        (-1500.0, "short", None, "-1.5 k"),
        (999.0, "short", None, "999"),
        (0.00198, "short", None, "0.00198"),
        (2e6, "cps", None, "2 M /s"),
        (4.0, "none", None, "4"),
        (12345.0, "none", None, "12345"),
        (2.6, "none", 0, "3"),
    ],
)
def test_a_value_is_shown_with_its_unit(
    value: float, unit: Unit, decimals: int | None, text: str
) -> None:
    assert numbers.shown(value, unit, decimals) == text


def test_marks_of_an_axis_are_round_and_hold_all_values() -> None:
    assert numbers.ticks(0.0, 11.3, 5) == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5]
    assert numbers.ticks(-0.2, 0.9, 4) == pytest.approx([-0.5, 0.0, 0.5, 1.0])
    assert numbers.ticks(3.0, 3.0, 2) == [2.0, 4.0, 6.0]
    assert numbers.ticks(0.0, 2.0, 5, whole=True) == [0.0, 1.0, 2.0]


def test_marks_of_time_are_round_and_few() -> None:
    found = numbers.time_ticks(1000.0, 4600.0, 6)
    assert [at % 600 for at, _ in found] == [0.0] * 6
    assert all(re.fullmatch(r"\d\d:\d\d", text) for _, text in found)
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", t) for _, t in numbers.time_ticks(1000, 1030, 4))


# --- charts -------------------------------------------------------------------------------------


def test_a_line_is_cut_where_points_are_missing() -> None:
    points = (*series(1.0, 2.0).points, *series(3.0, 4.0, start_s=1060.0).points)
    line = chart.Line("a", "#fff", points)
    drawn = chart.draw(panel(), [line], [], SPAN, (400, 200))
    assert drawn.count('stroke="#fff"') == 2


def test_stacked_values_stand_on_each_other_and_those_of_nothing_are_left_out() -> None:
    stacked = panel(stacked=True, colours={"b": "red"})
    lines = chart.lines(stacked, [answer("a", 1, 2), answer("zero", 0, 0), answer("b", 3, 4)])
    assert [(line.name, [v for _, v in line.points]) for line in lines] == [
        ("a", [1, 2]),
        ("b", [4, 6]),
    ]
    assert lines[1].colour == "#F2495C"


def test_a_mark_stands_at_its_moment_and_says_why() -> None:
    drawn = chart.draw(panel(), [], [Mark(1050.0, "<who>", "#f00")], SPAN, (400, 200))
    frame = chart.Frame(SPAN, 0.0, 1.0, 400, 200)
    assert f"M{frame.x(1050.0):.1f} " in drawn
    assert "&lt;who&gt;" in drawn


def test_marks_of_one_moment_do_not_hide_each_other() -> None:
    lines = chart.lines(panel(), [answer("a", 1, 2)])
    marks = [Mark(1050.0, "lost", "#f00"), Mark(1050.0, "join", "#00f"), Mark(1060.0, "b", "#0f0")]
    svg = chart.draw(panel(), lines, marks, SPAN, (400, 200))
    drawn = re.findall(r'<path d="M([\d.]+) (\d+)V\d+" stroke-dasharray="3 3"/>', svg)
    (lost, join, other) = ((float(x), int(top)) for x, top in drawn)
    assert lost[0] == join[0] < other[0]
    assert join[1] - lost[1] == 3, "one has its dashes where the other has its gaps"
    assert other[1] == lost[1]


def test_values_that_are_no_numbers_are_not_drawn() -> None:
    assert chart.lines(panel(), [answer("a", float("nan"), float("inf"))]) == []


@pytest.mark.parametrize("kind", ["stat", "timeseries", "bargauge", "table"])
def test_a_panel_without_a_value_says_so_and_why(kind: str) -> None:
    why = Query(expr="x", legend="a", may_be_empty="only with etcd")
    empty = Panel(title="T", answers="A", kind=kind, queries=(why,), width=6, height=6)  # type: ignore[arg-type]
    drawn = Drawn(empty, [answer("a", float("nan"))], [], SPAN)
    assert "no value: only with etcd" in panels.content(drawn, 300, 200)


def test_a_number_has_words_and_colours_by_threshold() -> None:
    words = panel("stat", texts={2: ("running", "green")}, base="red")
    assert "running" in panels.content(Drawn(words, [answer("s", 2)], [], SPAN), 300, 200)
    slow = panel("stat", unit="s", thresholds=((5, "orange"),))
    late = panels.content(Drawn(slow, [answer("took", 1, 7)], [], SPAN), 300, 200)
    assert "7 s" in late
    assert "#FF9830" in late


def test_the_worst_job_stands_at_the_top_of_a_table() -> None:
    table = Panel(
        title="T",
        answers="A",
        kind="table",
        queries=(Query(expr="x", legend="state"),),
        columns=(Column(),),
        width=24,
        height=6,
    )
    states = {"fine": 2.0, "held": 5.0, "also fine": 2.0}
    rows = [
        Answer("state", table.queries[0], series(value, labels={"job": job}))
        for job, value in states.items()
    ]
    html = panels.content(Drawn(table, rows, [], SPAN), 800, 200)
    assert re.findall(r"<td>([a-z ]+)</td>", html) == ["held", "also fine", "fine"]


def test_a_long_legend_takes_more_lines_and_the_picture_less_room() -> None:
    def height(names: int) -> int:
        found = [answer(f"a long name {n}", 1.0, 2.0) for n in range(names)]
        html = panels.content(Drawn(panel(), found, [], SPAN), 400, 300)
        assert html.count("<span>") == names
        drawn, legend_px = (int(px) for px in re.findall(r"height[=:]\"?(\d+)", html)[:2])
        assert drawn + legend_px == 300 - panels.TITLE_PX - panels.PADDING_PX
        return legend_px

    assert [height(names) / panels.LEGEND_PX for names in (1, 3, 6, 60)] == [1, 1, 2, 3]


def test_the_last_moment_of_an_axis_is_whole() -> None:
    """It would leave the picture by half of its width."""
    html = panels.content(Drawn(panel(), [answer("a", 1.0, 2.0)], [], SPAN), 400, 300)
    places = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">', html)
    assert max(map(float, places)) + 28 <= 400 - 2 * panels.PADDING_PX


def test_labels_make_the_legend() -> None:
    assert (
        legend("{{job}} on {{ instance }}", series(labels={"job": "j", "instance": "a"}))
        == "j on a"
    )
    assert legend("", series(labels={"job": "j"})) == "job=j"


def test_the_scrape_interval_is_that_of_the_samples(server: Answers) -> None:
    server.scrape_s = 7.0
    assert scrape_interval_s(Prometheus(server.url), "walk", 1000.0) == 7.0


def test_variables_are_filled_in() -> None:
    context = Context(Span(0.0, 600.0, 2.0), "a.b", 5.0)
    filled = context.fill('x{job=~"$job"}[$__rate_interval] $__interval $__range')
    assert filled == 'x{job=~"a\\\\.b"}[20000ms] 2000ms 600000ms'
    assert 'job=~".+"' in Context(SPAN, None, 5.0).fill('{job=~"$job"}')


# --- pages --------------------------------------------------------------------------------------


class Fetches(HTMLParser):
    """Addresses that a browser would fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object"):
            self.found.append(tag)
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "srcset")]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.slug)
def test_a_page_shows_every_panel_and_fetches_nothing(board: Dashboard, server: Answers) -> None:
    server.series["rallypoint_"] = [({"job": "<b>", "instance": "a"}, "2")]
    context = Context(SPAN, None if board.many_jobs else "walk", 15.0)
    made = page.page(Prometheus(server.url), board, context, DASHBOARDS)
    assert made.empty == ()
    assert all(panel.title.replace("'", "&#x27;") in made.html for panel in board.panels())
    assert "<b></b>" not in made.html
    fetches = Fetches()
    fetches.feed(made.html)
    assert fetches.found == []
    assert "default-src 'none'" in made.html
    assert not any("$" in expr for expr in server.asked)


# --- the command --------------------------------------------------------------------------------


def preview(*arguments: str) -> int:
    return cli.main(["dashboard", "preview", *arguments])


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", NO_PROGRAMS)


@pytest.mark.usefixtures("no_programs")
def test_without_chromium_the_pages_are_there_and_what_is_missing_is_said(
    server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview("--prometheus", server.url, "--output", str(tmp_path)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"{b.slug}.html" for b in DASHBOARDS}
    said = capsys.readouterr().err
    assert "apt-get install chromium" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--job", "run"), "--job 'run': "),
        (("--only", "jobs"), "no dashboard is 'jobs'; there are fleet, job"),
        (("--last-s", "1"), "at least 5 seconds"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(
    server: Answers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    output = tmp_path / "out"
    assert preview("--prometheus", server.url, "--output", str(output), *arguments) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("jobs", "said"),
    [((), "has no rallypoint_generation"), (("a", "b"), "several, say which: a, b")],
)
def test_the_job_must_be_known(
    server: Answers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    jobs: tuple[str, ...],
    said: str,
) -> None:
    server.jobs = jobs
    assert preview("--prometheus", server.url, "--output", str(tmp_path)) == 2
    assert said in capsys.readouterr().err


def test_a_job_that_is_not_scraped_any_more_is_said(
    server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.series.clear()
    assert preview("--prometheus", server.url, "--output", str(tmp_path)) == 1
    assert "no two samples" in capsys.readouterr().err


def test_a_directory_without_supervisor_is_exit_code_3(tmp_path: Path) -> None:
    assert preview("--dir", str(tmp_path), "--output", str(tmp_path / "out")) == 3


def test_what_a_server_says_is_told(server: Answers) -> None:
    client = Prometheus(server.url)
    assert client.scrape_errors() == ["401 Unauthorized"]
    with pytest.raises(PrometheusError, match="parse error"):
        client.instant("refused", 0.0)
    server.raw = b"<html>"
    with pytest.raises(PrometheusError, match="not that of a Prometheus"):
        client.instant("x", 0.0)
    with pytest.raises(PrometheusError, match="no address"):
        Prometheus("prometheus:9090")
    with pytest.raises(PrometheusError, match="no answer"):
        Prometheus("http://127.0.0.1:9").instant("x", 0.0)
