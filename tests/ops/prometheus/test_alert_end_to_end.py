"""A worker is killed under a real job: the alert arrives where Alertmanager sends it, and resolves."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rallypoint.daemon.executors import proctable
from tests.fakes.prometheus import Webhook, alertmanager, prometheus, rule_errors, webhook
from tests.faults.injectors.job import WAIT_S, FaultJob
from tests.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600)]

JOB = "walker"
RULES = ROOT / "ops/prometheus/rallypoint.rules.yml"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FaultJob]:
    """Two workers that train."""
    job = FaultJob(tmp_path / "run", "--workers", "2")
    try:
        yield job
    finally:
        job.end_all()


@pytest.fixture
def received() -> Iterator[Webhook]:
    with webhook() as receiver:
        yield receiver


def hastened() -> str:
    """The same rules, each of which waits 1 s instead of minutes before it fires."""
    return re.sub(r"^( +for:) \d+[smh]$", r"\1 1s", RULES.read_text(), flags=re.MULTILINE)


def selectors() -> set[str]:
    """What the expressions of the rules ask of a supervisor."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    exprs = (rule["expr"] for group in groups for rule in group["rules"])
    return {x for expr in exprs for x in re.findall(r"(?<!:)\brallypoint_\w+(?:{[^}]*})?", expr)}


def _is_stopped(pid: int) -> bool:
    entry = proctable.read(pid)
    return entry is not None and entry.state == "T"


def test_a_killed_worker_becomes_an_alert_that_resolves_when_it_is_back(
    tmp_path: Path, job: FaultJob, received: Webhook
) -> None:
    """The next life of the worker stops in its warm-up, and goes on once the alert has come. In the end
    there is no supervisor that Prometheus could ask."""
    rules = tmp_path / "hastened.rules.yml"
    rules.write_text(hastened())
    target = urlsplit(job.settle(2)["metrics_url"]).netloc
    scrape = {"job_name": JOB, "static_configs": [{"targets": [target]}]}
    with (
        alertmanager(tmp_path, received.url) as notified,
        prometheus(tmp_path, [scrape], rules=[rules], alertmanagers=[notified]) as server,
    ):
        whole = "job:rallypoint_world_size:newest == 2"
        job.wait_until(lambda: server.instant(whole, time.time()), lambda: whole)
        empty = [x for x in selectors() if not server.instant(x, time.time())]
        assert not empty, "a supervisor serves all that the rules ask for"
        job.arming.arm("warm_up:1=stop")
        (victim,) = (w for w in job.status()["workers"] if w["slot"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        (stopped,) = job.wait_fired()
        job.wait_until(lambda: _is_stopped(stopped.pid), lambda: "the next life to stop")
        fired = received.wait_for("RallypointWorldSizeBelowDesired", "firing", WAIT_S)
        os.kill(stopped.pid, signal.SIGCONT)
        assert rule_errors(server) == {}
        resolved = received.wait_for("RallypointWorldSizeBelowDesired", "resolved", WAIT_S)
        after = job.settle(2)
        assert job.end() == 0
        down = received.wait_for("RallypointJobDown", "firing", WAIT_S)
    assert fired["labels"] == {
        "alertname": "RallypointWorldSizeBelowDesired",
        "job": JOB,
        "severity": "warning",
    }
    assert "1 of 2 workers" in fired["annotations"]["description"]
    assert fired["annotations"]["runbook_url"] == "docs/alerts/world-size-below-desired.md"
    assert resolved["labels"] == fired["labels"]
    assert after["workers"][1]["incarnation"] == victim["incarnation"] + 1
    assert down["annotations"]["summary"] == f"No supervisor of job {JOB} answers."
