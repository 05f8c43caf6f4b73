"""Every expression of every dashboard, on a real Prometheus that scrapes a real job while it is hurt."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from rallypoint.ops.grafana import evaluate
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.evaluate import Context
from rallypoint.ops.grafana.model import Dashboard, Panel, Query
from rallypoint.ops.grafana.prometheus import Prometheus, Span
from rallypoint.ops.grafana.scraper import SCRAPE_S, scraper
from tests.fakes.etcd_server import EtcdCluster
from tests.fakes.supervised import Status
from tests.faults.injectors.job import has_checkpoint
from tests.faults.injectors.nodes import Nodes, nodes, together

pytestmark = [pytest.mark.slow, pytest.mark.faults]

A = ("--workers", "2")
OPTIONS = ("--set", "job.min_workers=2", "--set", "job.max_workers=3")
STEP_S = 1.0
SEEN_S = 3.0
"""Time that a state is left to stand, so that it is scraped a few times."""


@dataclass(frozen=True)
class Watched:
    """A Prometheus that has seen the whole life of a job."""

    server: Prometheus
    context: Context


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

        job.start("a", options=A)
        job.start("b")
        _all_train(job)
        aim()
        job["a"].wait_for(has_checkpoint, "a checkpoint")
        time.sleep(SEEN_S)
        _lose(job, 1)
        _hold(job)
        stack.callback(job["a"].end_all)  # the workers that its successor takes over
        _restart_supervisor(job)
        aim()
        time.sleep(SEEN_S)
        span = Span(start_s, time.time(), STEP_S)
        yield Watched(seer.server, Context(span, job.job, SCRAPE_S))
        assert set(job.end("a", "b").values()) == {0}


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
    job.start("a", options=A)
    _all_train(job)
    assert {w["pid"] for w in job["a"].status()["workers"] if w["node"] == "a"} == pids


CASES = [
    pytest.param(panel, query, id=f"{board.slug}-{panel.title}-{at}")
    for board in DASHBOARDS
    for panel in board.panels()
    for at, query in enumerate(panel.queries)
]


@pytest.mark.parametrize(("panel", "query"), CASES)
def test_an_expression_has_a_value(watched: Watched, panel: Panel, query: Query) -> None:
    found = evaluate.ask(watched.server, query.expr, watched.context, instant=panel.instant)
    points = [point for series in found for point in series.finite]
    assert points or query.may_be_empty


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.slug)
def test_losses_and_planned_changes_are_marked(watched: Watched, board: Dashboard) -> None:
    said = {
        marks.name: [text for _, text in evaluate.moments(watched.server, marks, watched.context)]
        for marks in board.marks
    }
    job = watched.context.job
    assert f"{job}: worker_lost" in said["somebody was lost"]
    assert f"{job}: join" in said["planned change"]
