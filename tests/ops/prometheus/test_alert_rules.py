"""The alert rules: accepted by Prometheus, each shown to fire and to keep quiet, each with a page."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rallypoint.daemon import cli
from rallypoint.daemon.executors.metrics import train_name
from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared.figures import FIGURES
from tests.fakes.prometheus import program
from tests.project import ROOT, pyproject, report

FOLDER = ROOT / "ops/prometheus"
RULES_FILE = FOLDER / "rallypoint.rules.yml"
TEST_FILES = sorted(FOLDER.glob("*.test.yml"))
PAGES = ROOT / "docs/alerts"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
SECTIONS = ["What it means", "How soon", "What to look at", "What to do"]
OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that the supervisor does not know of."""

Rule = dict[str, Any]
Series = dict[str, dict[str, tuple[str, ...]]]


def rules() -> list[Rule]:
    document = yaml.safe_load(RULES_FILE.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
EACH_ALERT = pytest.mark.parametrize("name", sorted(ALERTS))


def page(name: str) -> Path:
    path: str = ALERTS[name]["annotations"]["runbook_url"]
    return ROOT / path


def run(name: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [program(name), *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_rules() -> None:
    run("promtool", "check", "rules", RULES_FILE)


@pytest.mark.slow
@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.name)
def test_alerts_fire_when_they_should_and_only_then(file: Path) -> None:
    run("promtool", "test", "rules", file)


def test_the_examples_are_valid() -> None:
    run("promtool", "check", "config", "--syntax-only", FOLDER / "prometheus.example.yml")
    run("amtool", "check-config", FOLDER / "alertmanager.example.yml")


def test_the_example_of_alertmanager_knows_only_alerts_that_exist() -> None:
    text = (FOLDER / "alertmanager.example.yml").read_text()
    report(set(re.findall(r"Rallypoint\w+", text)) - ALERTS.keys(), "no such alert")


def asked(name: str) -> Iterator[list[bool]]:
    """For each scenario of the unit tests that asks for this alert: whether it fires, in time order."""
    for file in TEST_FILES:
        for scenario in yaml.safe_load(file.read_text())["tests"]:
            asks = [x for x in scenario["alert_rule_test"] if x["alertname"] == name]
            asks.sort(key=lambda x: _seconds(x["eval_time"]))
            if asks:
                yield [bool(x.get("exp_alerts")) for x in asks]


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


@EACH_ALERT
def test_an_alert_is_shown_to_come_to_go_and_to_stay_away(name: str) -> None:
    scenarios = list(asked(name))
    assert any(x[0] is False and True in x and x[-1] is False for x in scenarios), "comes and goes"
    assert any(True not in x for x in scenarios), "stays away from what only looks like it"


@EACH_ALERT
def test_an_alert_says_what_somebody_who_is_called_must_know(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "{{ $labels.job }}" in rule["annotations"]["summary"]
    assert "$value" in (said := rule["annotations"]["description"]) or "query" in said


@EACH_ALERT
def test_an_alert_has_a_page_with_its_severity_and_patience(name: str) -> None:
    text = page(name).read_text()
    after = f"after `{ALERTS[name]['for']}`" if "for" in ALERTS[name] else "at once"
    severity = ALERTS[name]["labels"]["severity"]
    assert text.startswith(f"# {name}\n\nSeverity `{severity}`, {after} ([rule]("), text[:200]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS


def test_each_page_is_of_an_alert_and_listed() -> None:
    assert {page(name) for name in ALERTS} == set(PAGES.glob("*.md")) - {PAGES / "README.md"}
    rows = re.findall(
        r"^\| \[(\w+)\]\(([\w-]+\.md)\) \| (\w+) \| ([\w ]+) \|",
        (PAGES / "README.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (name, page(name).name, rule["labels"]["severity"], rule.get("for", "at once"))
        for name, rule in ALERTS.items()
    ]


def served() -> Series:
    """Every series that a supervisor serves or a rule records, and the values of its own labels."""
    found: Series = {
        f"rallypoint_{spec.name}{suffix}": dict(spec.labels)
        for spec in TABLE
        for suffix in SUFFIXES.get(spec.kind, ("",))
    }
    found |= {train_name(figure.name): {} for figure in FIGURES}
    return found | {rule["record"].split(":")[1]: {} for rule in rules() if "record" in rule}


def wrong(text: str, known: Series) -> Iterator[str]:
    """Series and label values in a text that are not known."""
    for name, matchers in re.findall(r"\b(rallypoint_\w*\w)\b(?:\{([^}]*)\})?", text):
        if name not in known:
            yield name
            continue
        for label, values in re.findall(r"""(\w+)[!=~]+["']([^"']*)["']""", matchers):
            missing = {*values.split("|")} - {*known[name].get(label, ())}
            if missing and label not in OF_PROMETHEUS:
                yield f"{name} has no {label} {sorted(missing)}"


def test_metrics_and_label_values_exist() -> None:
    known = served()
    in_prose = known | {f"rallypoint_{spec.name}": dict(spec.labels) for spec in TABLE}
    texts = {
        rule.get("alert") or rule["record"]: (f"{rule['expr']} {rule.get('annotations')}", known)
        for rule in rules()
    }
    texts |= {path.name: (path.read_text(), known) for path in TEST_FILES}
    texts |= {path.name: (path.read_text(), in_prose) for path in PAGES.glob("*.md")}
    report(
        (f"{where}: {name}" for where, (text, have) in texts.items() for name in wrong(text, have)),
        "the supervisor serves no such series",
    )


def test_no_expression_takes_the_time_of_another_clock() -> None:
    clocks = re.compile(r"\b(time|timestamp|hour|minute|day_of_\w+)\(|_timestamp|_unix|start_time")
    report(
        (r.get("alert", "") for r in rules() if clocks.search(r["expr"])), "use an age or a rate"
    )


def test_commands_of_the_pages_exist() -> None:
    commands = {*pyproject()["project"]["entry-points"]["rallypoint.commands"], *cli._COMMANDS}
    for path in sorted(PAGES.glob("*.md")):
        named = set(re.findall(r"\brallypoint ([a-z-]+) (?:--|list|clear|[A-Z])", path.read_text()))
        report(named - commands, f"{path.name}: rallypoint has no such command")
