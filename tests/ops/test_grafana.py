"""The dashboards' files: what the code says, what Grafana needs, and nothing that has no metric."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared.figures import FIGURES
from rallypoint.ops.grafana import grafanajson
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.command import COMMAND
from rallypoint.ops.grafana.model import GRID_WIDTH, Dashboard, Unit
from tests.fakes.command import run_command
from tests.fakes.grafana_schema import differences
from tests.project import ROOT

BOARDS = pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.slug)
MAY_BE_EMPTY = 5
OLDEST_SCHEMA = 36
FILLED_IN = {"$job", "$__interval", "$__rate_interval", "$__range"}
"""What Grafana puts values in for."""
SHIPPED = ROOT / "ops/grafana/dashboards"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def test_the_files_are_what_the_code_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(COMMAND, "export", "--output", str(tmp_path), "--json") == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["files"]]
    assert {path.name: path.read_text() for path in written} == {
        path.name: path.read_text() for path in SHIPPED.iterdir()
    }, "run: rallypoint dashboard export --output ops/grafana/dashboards"


@BOARDS
def test_grafana_can_show_it(board: Dashboard) -> None:
    assert list(problems(grafanajson.document(board))) == []


def problems(board: dict[str, Any]) -> Iterator[str]:
    """What Grafana's own schema forbids; if nothing, what it does not say."""
    found = differences(board)
    if found:
        yield from found
        return
    if not re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"]):
        yield f"uid {board['uid']!r}: at most 40 of a-z, 0-9 and -"
    if board["schemaVersion"] < OLDEST_SCHEMA:
        yield f"schemaVersion {board['schemaVersion']} is older than {OLDEST_SCHEMA}"
    if [v["name"] for v in board["templating"]["list"]] != ["datasource", "job"]:
        yield "a data source and a job are chosen"
    if not board["annotations"]["list"]:
        yield "no annotations"
    for annotation in board["annotations"]["list"]:
        yield from expression(annotation["name"], annotation["expr"])
    if len({panel["id"] for panel in board["panels"]}) < len(board["panels"]):
        yield "two panels have one id"
    for one, other in combinations(board["panels"], 2):
        if overlap(one["gridPos"], other["gridPos"]):
            yield f"{one['title']!r} and {other['title']!r} overlap"
    for panel in board["panels"]:
        if panel["gridPos"]["x"] + panel["gridPos"]["w"] > GRID_WIDTH:
            yield f"{panel['title']!r} leaves the grid"
        if panel["type"] != "row":
            yield from contents(panel)


def contents(panel: dict[str, Any]) -> Iterator[str]:
    name, defaults, targets = panel["title"], panel["fieldConfig"]["defaults"], panel["targets"]
    if not name or not panel["description"]:
        yield f"{name!r}: a panel has a title, and says what it answers"
    if not targets:
        yield f"{name!r} has no query"
    if len({target["refId"] for target in targets}) < len(targets):
        yield f"{name!r}: two queries have one refId"
    for what in (panel, *targets):
        if what["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{name!r} asks {what['datasource']}"
    for target in targets:
        yield from expression(f"{name} {target['refId']}", target["expr"])
    if defaults["unit"] not in get_args(Unit):
        yield f"{name!r}: unit {defaults['unit']!r} is none of {get_args(Unit)}"
    first, *above = [step["value"] for step in defaults["thresholds"]["steps"]]
    if first is not None:
        yield f"{name!r}: the first threshold has no value"
    elif None in above or above != sorted(above):
        yield f"{name!r}: thresholds {above} do not rise"


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    apart = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or apart)


def expression(where: str, expr: str) -> Iterator[str]:
    unknown = set(re.findall(r"\$\w+", expr)) - FILLED_IN
    if unknown:
        yield f"{where}: nothing fills in {sorted(unknown)}"
    if "rallypoint_" not in expr or 'job=~"$job"' not in expr:
        yield f"{where}: {expr!r} is not about the chosen job"


def broken(change: Callable[[dict[str, Any]], object]) -> list[str]:
    document = copy.deepcopy(grafanajson.document(DASHBOARDS[0]))
    change(document)
    return list(problems(document))


def drawn(document: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """The first panel of a kind, or of any that is no heading."""
    found = (p for p in document["panels"] if p["type"] != "row" and kind in ("", p["type"]))
    panel: dict[str, Any] = next(found)
    return panel


def defaults(document: dict[str, Any], kind: str = "") -> dict[str, Any]:
    found: dict[str, Any] = drawn(document, kind)["fieldConfig"]["defaults"]
    return found


def steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = defaults(document)["thresholds"]["steps"]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(stray=1), "dashboard.stray: Dashboard has no such field"),
        (lambda d: d.update(graphTooltip=7), "graphTooltip: 7 is no DashboardCursorSync"),
        (lambda d: d.update(tags=["a", 1]), "tags[1]: 1 is no str"),
        (lambda d: drawn(d).update(type="pie"), "'pie'"),
        (lambda d: drawn(d).update(datasource=[]), "datasource: [] is no"),
        (lambda d: drawn(d)["gridPos"].update(w="12"), "gridPos.w: '12' is no int"),
        (lambda d: drawn(d)["targets"][0].update(exp="up"), "exp: Dataquery has no such field"),
        (lambda d: drawn(d)["targets"][0].update(format="csv"), "'csv' is no PromQueryFormat"),
        (lambda d: drawn(d)["options"].update(cellHeight="xl"), "'xl' is no TableCellHeight"),
        (lambda d: defaults(d)["color"].update(mode="rainbow"), "is no FieldColorModeId"),
        (
            lambda d: defaults(d, "timeseries")["custom"].update(drawStyle="dots"),
            "custom.drawStyle: 'dots' is no GraphDrawStyle",
        ),
        (lambda d: d.update(uid="Ä b"), "uid"),
        (lambda d: d.update(schemaVersion=12), "schemaVersion"),
        (lambda d: d["templating"]["list"].pop(0), "a data source and a job"),
        (lambda d: d["annotations"]["list"].clear(), "no annotations"),
        (lambda d: drawn(d)["targets"].clear(), "has no query"),
        (lambda d: drawn(d).update(description=""), "says what it answers"),
        (lambda d: drawn(d)["gridPos"].update(x=23), "leaves the grid"),
        (lambda d: drawn(d)["gridPos"].update(h=99), "overlap"),
        (lambda d: drawn(d).update(id=d["panels"][-1]["id"]), "one id"),
        (lambda d: drawn(d)["datasource"].update(uid="mine"), "mine"),
        (lambda d: drawn(d)["targets"][0].update(expr="up"), "not about the chosen job"),
        (lambda d: drawn(d)["targets"][0].update(expr='rallypoint_x{job=~"$job"}[$y]'), "$y"),
        (lambda d: defaults(d).update(unit="parsec"), "parsec"),
        (lambda d: steps(d).insert(0, {"color": "red", "value": 1}), "the first threshold"),
        (lambda d: steps(d).extend({"color": "red", "value": v} for v in (2, 1)), "do not rise"),
    ],
)  # fmt: skip
def test_what_grafana_could_not_show_is_named(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    assert any(said in problem for problem in broken(change)), broken(change)


def known_series() -> dict[str, dict[str, tuple[str, ...]]]:
    """Every series that a supervisor serves, and the values of its labels."""
    series: dict[str, dict[str, tuple[str, ...]]] = {}
    for spec in TABLE:
        for suffix in SUFFIXES.get(spec.kind, ("",)):
            series[f"rallypoint_{spec.name}{suffix}"] = dict(spec.labels)
    for figure in FIGURES:
        name = re.sub(r"[^a-zA-Z0-9_]", "_", figure.tag).lower()
        series[f"rallypoint_train_{name}"] = {}
    return series


def expressions(board: Dashboard) -> Iterator[str]:
    yield from (query.expr for panel in board.panels() for query in panel.queries)
    yield from (marks.expr for marks in board.marks)


@BOARDS
def test_every_metric_and_label_exists(board: Dashboard) -> None:
    known = known_series()
    for expr in expressions(board):
        selectors = re.findall(r"(rallypoint_\w+)\{([^}]*)\}", expr)
        assert selectors, expr
        assert len(selectors) == expr.count("rallypoint_"), expr
        for name, matchers in selectors:
            assert name in known, f"{name} is no metric: {expr}"
            for label, wanted in re.findall(r'(\w+)[!=~]+"([^"]*)"', matchers):
                values = known[name].get(label, ())
                unknown = set(wanted.split("|")) - {"$job", *values}
                assert not unknown, f"{name} has no {label}={unknown}: {expr}"


def test_few_queries_may_be_empty_and_each_says_why() -> None:
    queries = [q for board in DASHBOARDS for panel in board.panels() for q in panel.queries]
    assert len([query for query in queries if query.may_be_empty]) <= MAY_BE_EMPTY
    assert all(len(query.may_be_empty.split()) > 3 for query in queries if query.may_be_empty)


def test_names_are_unique() -> None:
    assert len({board.uid for board in DASHBOARDS}) == len(DASHBOARDS)
    for board in DASHBOARDS:
        titles = [panel.title for panel in board.panels()]
        assert len(set(titles)) == len(titles)
