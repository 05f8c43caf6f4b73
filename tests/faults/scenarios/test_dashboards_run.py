"""Every expression of every dashboard, on a real Prometheus that scrapes a real job while it is hurt."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from rallypoint.daemon import cli
from rallypoint.ops.grafana import evaluate
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.evaluate import Context
from rallypoint.ops.grafana.preview import chromium
from rallypoint.ops.grafana.preview.chromium import ChromiumError
from rallypoint.ops.grafana.preview.page import WIDTH_PX
from rallypoint.ops.grafana.prometheus import Prometheus, Span
from rallypoint.ops.grafana.scraper import SCRAPE_S, Scraper, scraper
from tests.fakes.etcd_server import EtcdCluster
from tests.fakes.supervised import Status
from tests.faults.injectors.job import has_checkpoint
from tests.faults.injectors.nodes import Nodes, nodes, together

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600)]

A = ("--workers", "2")
OPTIONS = (
    *("--set", "job.min_workers=2", "--set", "job.max_workers=3"),
    *("--set", "membership.orphan_grace_s=120.0"),
)
STEP_S = 1.0
WAIT_S = 200.0
"""Bound of every wait: three programs that import much start beside other tests."""
SCRAPES = 3
"""How often both nodes are scraped in a state that is to be seen."""


@dataclass(frozen=True)
class Watched:
    """A Prometheus that has seen the whole life of a job."""

    server: Prometheus
    context: Context
    directory: Path
    """Of one of its nodes."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdCluster) -> Iterator[Watched]:
    """One job for all tests of this module: two nodes, three workers."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    base = tmp_path_factory.mktemp("watched")
    start_s = time.time()
    with scraper(base) as seer, nodes(base, etcd, *OPTIONS) as job, ExitStack() as stack:

        def aim() -> None:
            seer.aim({(job.job, n): job[n].status()["metrics_url"] for n in job.running})

        for node in (*job.start("a", options=A), *job.start("b")):
            node.wait_s = WAIT_S
        _all_train(job)
        aim()
        job["a"].wait_for(has_checkpoint, "a checkpoint")
        _wait_scraped(seer, job)
        _lose(job, 1)
        _hold(job)
        stack.callback(job["a"].end_all)  # the workers that its successor takes over
        _restart_supervisor(job)
        aim()
        span = Span(start_s, _wait_scraped(seer, job), STEP_S)
        context = Context(span, job.job, SCRAPE_S)
        yield Watched(seer.server, context, job["a"].rundir.path)
        assert set(job.end("a", "b").values()) == {0}


def _wait_scraped(seer: Scraper, job: Nodes) -> float:
    """Until both nodes were scraped from now on, the last time just now; that moment."""
    begin_s, moment_s = time.time(), [0.0]

    def look() -> bool:
        moment_s[0] = now_s = time.time()
        samples = f'rallypoint_generation{{job="{job.job}"}}'
        both = f"count(count_over_time({samples}[{1 + round(1000 * (now_s - begin_s))}ms]) >= {SCRAPES})"
        return [
            [value for series in seer.server.instant(query, now_s) for _, value in series.points]
            for query in (both, f"count({samples})")
        ] == [[2.0], [2.0]]

    job["a"].wait_until(look, lambda: f"both nodes to be scraped: {seer.said()}")
    return moment_s[0]


def _all_train(job: Nodes, beyond: int = 0) -> Status:
    return job["a"].wait_for(
        lambda s: together(s, 3) and s["generation"] > beyond, "three workers to train"
    )


def _lose(job: Nodes, rank: int) -> None:
    """A worker is killed; the others train on, and its next life enters."""
    before = job["a"].status()["generation"]
    (node,) = {w["node"] for w in job["a"].status()["workers"] if w["rank"] == rank}
    job[node].kill(job[node].status(), rank)
    after = _all_train(job, before + 1)
    assert after["generation"] > before
    causes = {x["cause"] for x in job["a"].journal() if x["event"] == "generation"}
    assert "worker_lost" in causes


def _hold(job: Nodes) -> None:
    """Two of three are killed at once: fewer than the job needs."""
    before = job["a"].status()
    job["a"].kill(before, *(w["rank"] for w in before["workers"] if w["node"] == "a"))
    _all_train(job, before["generation"])
    holds = [x["hold"] for x in job["b"].journal() if x["event"] == "generation"]
    assert any(holds)


def _restart_supervisor(job: Nodes) -> None:
    """SIGKILL to a supervisor; the next one takes its workers over."""
    old = job["a"]
    pids = {w["pid"] for w in old.status()["workers"] if w["node"] == "a"}
    old.kill_supervisor()
    (again,) = job.start("a", options=A)
    again.wait_s = WAIT_S
    _all_train(job)
    assert {w["pid"] for w in job["a"].status()["workers"] if w["node"] == "a"} == pids


def test_every_expression_has_a_value(watched: Watched) -> None:
    empty = []
    for board in DASHBOARDS:
        for panel in board.panels():
            for query in panel.queries:
                found = evaluate.ask(
                    watched.server, query.expr, watched.context, instant=panel.instant
                )
                if not query.may_be_empty and not any(series.finite for series in found):
                    empty.append(f"{board.slug}, {panel.title}: {query.expr}")
    assert empty == []


def test_losses_and_planned_changes_are_marked(watched: Watched) -> None:
    job = watched.context.job
    for board in DASHBOARDS:
        said = {
            marks.name: {
                text for _, text in evaluate.moments(watched.server, marks, watched.context)
            }
            for marks in board.marks
        }
        assert f"{job}: worker_lost" in said["somebody was lost"]
        assert f"{job}: join" in said["planned change"]


def preview(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What ``rallypoint dashboard preview`` prints; skips where nothing can draw."""
    try:
        chromium.find()
    except ChromiumError as error:
        pytest.skip(str(error))
    assert cli.main(["dashboard", "preview", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def assert_drawn(path: str) -> None:
    """A picture as wide as a page, with something on it."""
    pixels = image.imread(path)
    assert pixels.shape[1] == WIDTH_PX
    brightness = pixels[::4, ::4, :3].sum(axis=2)
    assert len(np.unique(brightness)) > 50


def test_the_preview_draws_what_prometheus_has(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, span = watched.context.job, watched.context.span
    assert job is not None
    drawn = preview(
        capsys,
        *("--prometheus", watched.server.url, "--job", job, "--output", str(tmp_path)),
        *("--last-s", str(time.time() - span.start_s), "--only", "fleet,recovery"),
    )
    assert [Path(path).stem for path in drawn["pictures"]] == ["fleet", "recovery"]
    for path in drawn["pictures"]:
        assert_drawn(path)
    may_be_empty = {
        panel.title
        for board in DASHBOARDS
        for panel in board.panels()
        if all(query.may_be_empty for query in panel.queries)
    }
    assert {title for titles in drawn["empty"].values() for title in titles} <= may_be_empty


def test_the_preview_of_a_directory_watches_its_run(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = preview(
        capsys,
        *("--dir", str(watched.directory), "--output", str(tmp_path)),
        *("--last-s", "8", "--only", "job"),
    )
    (picture,) = drawn["pictures"]
    assert_drawn(picture)
    assert "Is it training?" not in drawn["empty"].get("job", [])
    assert "On how many workers?" not in drawn["empty"].get("job", [])
