"""What /metrics of a real job says while its workers are killed: one job for all cases."""

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared.activity import ACTIVITIES, PRODUCTIVE, RECOVERY_PHASES
from rallypoint.daemon.shared.plan import CHANGE_CAUSES
from tests.fakes.scrape import labelled, parse
from tests.faults.conftest import Jobs
from tests.faults.injectors.job import FaultJob, by_rank

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

WORKERS = 2
HOLD_S = 2.0
COUNTING = tuple(
    f"{spec.name}{suffix}"
    for spec in TABLE
    for suffix in {"counter": ("",), "histogram": ("_bucket", "_count", "_sum")}.get(spec.kind, ())
)


@dataclass(frozen=True)
class Scrape:
    """Values by series, the text, and between which two moments it was made."""

    values: Mapping[str, float]
    text: str
    after_s: float
    before_s: float

    def wall(self) -> dict[str, float]:
        return labelled(self.values, "wall_seconds_total")

    def slots_shown(self) -> set[str]:
        return set(labelled(self.values, "worker_rollout_seconds"))


def scrape(job: FaultJob) -> Scrape:
    url, after_s = job.status()["metrics_url"], time.monotonic()
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own server
        text = answer.read().decode()
    return Scrape(parse(text), text, after_s, time.monotonic())


@pytest.fixture(name="job")
def running_job(jobs: Jobs) -> Iterator[FaultJob]:
    with jobs.case("--workers", str(WORKERS)) as job:
        job.settle(WORKERS)
        yield job


def lose_a_worker(job: FaultJob) -> tuple[Scrape, Scrape, Scrape]:
    """SIGKILL to rank 1 in an update, where the other waits for it, and its successor held up in its
    warm-up: before, without it, and with both again."""
    before = scrape(job)
    status = job.status()
    victim = by_rank(status, 1)
    slot = victim["slot"]
    job.arming.arm("between_steps:1=kill", f"warm_up:{slot}=stop")
    killed, stopped = job.wait_fired(2)
    assert killed.pid == victim["pid"]
    alone = job.wait_for(lambda s: (s["generation"] or 0) > status["generation"], "the survivor")
    job.wait_for(lambda s: s["iteration"] > alone["iteration"] + 1, "it trains on alone")
    without = scrape(job)
    assert str(slot) not in without.slots_shown()
    os.kill(stopped.pid, signal.SIGCONT)
    job.settle(WORKERS, newer_than={slot: victim["incarnation"]})
    return before, without, scrape(job)


def test_counters_do_not_fall_and_no_series_of_the_dead_stays(job: FaultJob) -> None:
    before, without, after = lose_a_worker(job)
    for earlier, later in ((before, without), (without, after)):
        fallen = [
            name
            for name, value in earlier.values.items()
            if name.partition("{")[0] in COUNTING and later.values[name] < value
        ]
        assert not fallen
    assert before.slots_shown() == after.slots_shown() == {"0", "1"}
    assert len(without.slots_shown()) == 1
    assert after.values.keys() == before.values.keys(), (
        "labels are bounded: nothing new, nothing lost"
    )
    restarts = 'worker_restarts_total{reason="signal"}'
    assert after.values[restarts] == before.values[restarts] + 1
    lost = 'membership_changes_total{cause="worker_lost"}'
    assert after.values[lost] >= before.values[lost] + 1


def test_every_second_of_every_slot_is_in_one_activity(job: FaultJob) -> None:
    before, without, after = lose_a_worker(job)
    for earlier, later in ((before, without), (without, after)):
        assert set(later.wall()) == set(ACTIVITIES)
        counted_s = sum(later.wall().values()) - sum(earlier.wall().values())
        least_s = WORKERS * (later.after_s - earlier.before_s)
        most_s = WORKERS * (later.before_s - earlier.after_s)
        assert least_s - 1e-3 <= counted_s <= most_s + 1e-3
    phases = labelled(after.values, "recovery_wall_seconds_total")
    assert set(phases) == set(RECOVERY_PHASES)
    assert sum(phases.values()) == pytest.approx(after.wall()["recovery"], abs=1e-3)
    assert phases["restart"] > 0.0
    badput = labelled(after.values, "badput_seconds_total")
    explained_s = sum(badput.values()) - badput["redone"]
    productive_s = sum(after.wall()[name] for name in PRODUCTIVE)
    assert explained_s == pytest.approx(sum(after.wall().values()) - productive_s, abs=1e-3)
    changes_s = sum(badput[cause] for cause in CHANGE_CAUSES)
    assert changes_s == pytest.approx(after.wall()["recovery"] - phases["restart"], abs=1e-3)
    assert badput["worker_lost"] > 0.0, "the survivor waited for it within its update"
    assert badput["redone"] > 0.0, "the dead worker's rollout"
    assert productive_s > sum(before.wall()[name] for name in PRODUCTIVE)


def test_a_hold_moves_only_hold(job: FaultJob) -> None:
    directory = str(job.rundir.path)
    assert main(["pause", "--dir", directory]) == 0
    paused = job.wait_for(lambda s: {w["state"] for w in s["workers"]} == {"waiting"}, "all hold")
    assert paused["state"] == "paused"
    job.wait_until(lambda: holds_alone(job), lambda: "nothing but hold to rise")
    first = scrape(job)
    time.sleep(HOLD_S)  # the fault itself
    second = scrape(job)
    assert main(["resume", "--dir", directory]) == 0
    job.settle(WORKERS)
    risen = {name: second.wall()[name] - first.wall()[name] for name in ACTIVITIES}
    assert risen.pop("hold") >= WORKERS * HOLD_S - 1e-3
    assert risen == pytest.approx(dict.fromkeys(risen, 0.0), abs=1e-6)
    badput = [labelled(s.values, "badput_seconds_total") for s in (first, second)]
    moved = {cause for cause in badput[0] if badput[1][cause] - badput[0][cause] > 1e-6}
    assert moved == {"hold"}
    assert second.values['job_state{state="paused"}'] == 1


def holds_alone(job: FaultJob) -> bool:
    """Rank 0 may still be about its checkpoint when all hold."""
    first, second = scrape(job).wall(), scrape(job).wall()
    return {name for name in ACTIVITIES if second[name] > first[name]} == {"hold"}


def test_promtool_finds_nothing_in_a_real_scrape(job: FaultJob) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: it comes with the package prometheus")
    found = subprocess.run(
        [promtool, "check", "metrics"],
        input=scrape(job).text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
