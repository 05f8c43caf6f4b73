"""The dashboards' files: what the code says, what Grafana needs, and nothing that has no metric."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared.figures import FIGURES
from rallypoint.ops.grafana import checks, grafanajson
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.command import COMMAND
from rallypoint.ops.grafana.model import Dashboard
from tests.fakes.command import run_command
from tests.project import ROOT

BOARDS = pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.slug)
MAY_BE_EMPTY = 5
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
    assert checks.problems(grafanajson.text(board)) == []


def broken(change: Callable[[dict[str, Any]], object]) -> list[str]:
    document = json.loads(grafanajson.text(DASHBOARDS[0]))
    change(document)
    return checks.problems(json.dumps(document))


def drawn(document: dict[str, Any]) -> dict[str, Any]:
    """The first panel that is no heading."""
    panel: dict[str, Any] = next(p for p in document["panels"] if p["type"] != "row")
    return panel


def steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = drawn(document)["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(uid="Ä b"), "uid"),
        (lambda d: d.update(schemaVersion=12), "schemaVersion"),
        (lambda d: d.update(stray=1), "unknown field `stray`"),
        (lambda d: d["templating"]["list"].pop(0), "a data source and a job"),
        (lambda d: d["annotations"]["list"].clear(), "no annotations"),
        (lambda d: drawn(d).pop("targets"), "missing required field `targets`"),
        (lambda d: drawn(d)["targets"].clear(), "has no query"),
        (lambda d: drawn(d).update(type="pie"), "Invalid value 'pie'"),
        (lambda d: drawn(d).update(description=""), "says what it answers"),
        (lambda d: drawn(d)["gridPos"].update(x=23), "leaves the grid"),
        (lambda d: drawn(d)["gridPos"].update(h=99), "overlap"),
        (lambda d: drawn(d).update(id=d["panels"][-1]["id"]), "one id"),
        (lambda d: drawn(d)["datasource"].update(uid="mine"), "Invalid enum value 'mine'"),
        (lambda d: drawn(d)["targets"][0].update(expr="up"), "not about the chosen job"),
        (lambda d: drawn(d)["targets"][0].update(expr='rallypoint_x{job=~"$job"}[$y]'), "$y"),
        (lambda d: drawn(d)["fieldConfig"]["defaults"].update(unit="parsec"), "parsec"),
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
