"""What the books say after a run's messages."""

import math
import time
from pathlib import Path

import prometheus_client
import pytest

from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.executors.books import BooksFile
from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.collectives import Use
from rallypoint.daemon.shared.config import Config, EnvSection, NodeSection
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.slotpage import LedgerReading
from tests.fakes.facts import A, B, C, committed, formed, plan

NO_LEDGER = LedgerReading(0, 0, ())


@pytest.fixture(name="metrics")
def fresh_metrics() -> Metrics:
    return Metrics()


@pytest.fixture(name="recorder")
def fresh_recorder(tmp_path: Path, metrics: Metrics) -> Recorder:
    config = Config(env=EnvSection(num_envs=8), node=NodeSection(workers=3))
    books = BooksFile(tmp_path / "books.page")
    return Recorder(Journal(tmp_path / "journal.jsonl"), metrics, config, books)


def value(metrics: Metrics, name: str) -> float:
    lines = prometheus_client.generate_latest(metrics.registry).decode().splitlines()
    return next(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))


def form(recorder: Recorder, generation: int, *keys: WorkerKey, **fields: object) -> None:
    recorder.plan_seen(plan(generation, *keys, **fields), 0.0)
    for key in keys:
        recorder.take(formed(key, generation, recorder.iteration), 0.0, 0.0)
    recorder.marked(generation)


def test_committed_iterations_are_counted_once(recorder: Recorder, metrics: Metrics) -> None:
    form(recorder, 1, A, B, restore=True, cause="start")
    for key in (A, B):
        recorder.take(committed(key, 1, {A: 60, B: 40}), 0.0, 0.0)
    recorder.close()
    assert (recorder.iteration, recorder.env_steps) == (1, 100)
    assert value(metrics, "rallypoint_env_steps_total") == 100
    assert value(metrics, "rallypoint_iterations_total") == 1
    assert value(metrics, 'rallypoint_membership_changes_total{cause="start"}') == 1
    assert value(metrics, 'rallypoint_envs{scope="global"}') == 16
    assert value(metrics, 'rallypoint_envs{scope="deficit"}') == 8
    assert value(metrics, "rallypoint_train_reward_mean") == 0.1


def test_uses_of_collectives_add_up_over_workers(recorder: Recorder, metrics: Metrics) -> None:
    form(recorder, 1, A, B, restore=True)
    for key in (A, B):
        uses = {"barrier": Use(1, 8, 0.25), "of_another_version": Use(1, 1, 1.0)}
        recorder.take(committed(key, 1, {A: 60}, collectives=uses), 0.0, 0.0)
    recorder.close()
    assert value(metrics, 'rallypoint_collective_seconds_count{name="barrier"}') == 2
    assert value(metrics, 'rallypoint_collective_seconds_sum{name="barrier"}') == 0.5
    assert value(metrics, 'rallypoint_collective_bytes_total{name="barrier"}') == 16
    assert value(metrics, 'rallypoint_collective_seconds_count{name="broadcast"}') == 0


def test_a_differing_hash_is_counted_and_changes_nothing(
    recorder: Recorder, metrics: Metrics
) -> None:
    form(recorder, 1, A, B, restore=True)
    recorder.take(committed(A, 1, {A: 60}), 0.0, 0.0)
    recorder.take(committed(B, 1, {A: 60}, state_hash="other"), 0.0, 0.0)
    recorder.close()
    assert value(metrics, "rallypoint_state_hash_mismatches_total") == 1
    assert value(metrics, "rallypoint_iterations_total") == 1


def test_steps_of_the_dead_are_lost_when_a_generation_without_them_has_formed(
    recorder: Recorder, metrics: Metrics
) -> None:
    lost = 'rallypoint_env_steps_lost_total{reason="died"}'
    form(recorder, 1, A, B, restore=True)
    recorder.worker_ended(B, 40, NO_LEDGER, by_agreement=False)
    assert value(metrics, lost) == 0
    recorder.take(committed(A, 1, {A: 60, B: 30}, how="held"), 0.0, 0.0)
    form(recorder, 2, A)
    assert value(metrics, lost) == 10
    recorder.worker_ended(A, 65, NO_LEDGER, by_agreement=False)
    recorder.close()
    assert value(metrics, lost) == 15, "nothing more can be committed after the end"


def test_a_restored_checkpoint_is_the_newest(recorder: Recorder, tmp_path: Path) -> None:
    saved = tmp_path / "iteration-5"
    saved.mkdir()
    (saved / "manifest.json").write_text("{}")
    message = messages.Restored(key=A, generation=1, iteration=5, path=str(saved), skipped=())
    recorder.take(message, 0.0, 2e12)
    assert recorder.checkpoints.newest is not None
    assert recorder.checkpoints.newest.iteration == 5
    assert recorder.checkpoints.newest.at_unix_s < 1e12, (
        "as old as its manifest, not as its reading"
    )
    recorder.close()


def committed_to(
    tier: messages.TierName | None, iteration: int, passed_over: int = 0
) -> messages.CheckpointDone:
    return messages.CheckpointDone(
        key=A,
        generation=1,
        iteration=iteration,
        path=f"{tier}/{iteration}",
        stall_s=0.0,
        persist_s=1.0,
        size_bytes=1,
        tier=tier,
        passed_over=passed_over,
    )


def test_each_tier_has_its_age_and_its_failures(recorder: Recorder, metrics: Metrics) -> None:
    """The slow one ends an older checkpoint after the fast one's: the newest stays the newest."""
    age = 'rallypoint_checkpoint_tier_age_seconds{{tier="{}"}}'.format
    failures = 'rallypoint_checkpoint_tier_failures_total{{tier="{}"}}'.format
    assert math.isnan(value(metrics, age("url")))
    now_unix_s = time.time()
    recorder.take(committed_to("local", 55), 0.0, now_unix_s - 100.0)
    assert math.isnan(value(metrics, age("url")))
    recorder.take(committed_to("url", 50, passed_over=2), 0.0, now_unix_s - 10.0)
    assert recorder.checkpoints.newest is not None
    assert recorder.checkpoints.newest.path == "local/55"
    assert 0.0 <= value(metrics, age("url")) - 10.0 < 90.0 <= value(metrics, age("local")) - 10.0
    for tier in ("url", "url", None):
        recorder.take(
            messages.CheckpointFailed(key=A, generation=1, iteration=60, error="away", tier=tier),
            0.0,
            now_unix_s,
        )
    assert value(metrics, failures("url")) == 2
    assert value(metrics, failures("local")) == 0
    passed_over = 'rallypoint_checkpoint_passed_over_total{{tier="{}"}}'.format
    assert (value(metrics, passed_over("url")), value(metrics, passed_over("local"))) == (2, 0)
    assert value(metrics, "rallypoint_checkpoint_failures_total") == 3
    recorder.close()


def test_a_full_disk_stops_the_journal_but_not_the_run(
    recorder: Recorder, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Journal, line: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "_append", full)
    form(recorder, 1, A, restore=True)
    recorder.take(committed(A, 1, {A: 60}), 0.0, 0.0)
    assert recorder.iteration == 1
    recorder.close()


def test_numeric_40_the_rate_is_of_the_generation_and_recovery_is_apart(
    recorder: Recorder, metrics: Metrics
) -> None:
    """Two ranks for two iterations, a recovery of 5 s, then one rank with half of the samples."""
    form(recorder, 1, A, B, restore=True)
    for iteration in (1, 2):
        for key in (A, B):
            recorder.take(committed(key, iteration, {A: 60, B: 40}, wall_s=0.5), 0.0, 0.0)
    assert value(metrics, "rallypoint_env_steps_per_second") == 200.0
    recorder.loss_noticed(B, 10.0, 10.0)
    recorder.plan_seen(plan(2, A, kind="forced", cause="worker_lost"), 10.0)
    recorder.take(formed(A, 2, 2, at_s=14.0), 14.0, 0.0)
    recorder.marked(2)
    recorder.take(messages.Stepped(key=A, generation=2, at_s=15.0), 15.0, 0.0)
    recorder.take(committed(A, 3, {A: 60}, generation=2, wall_s=0.5), 15.5, 0.0)
    recorder.close()
    assert value(metrics, "rallypoint_env_steps_per_second") == 120.0
    total = 'rallypoint_recovery_seconds_sum{kind="forced",phase="total"}'
    assert value(metrics, total) == 5.0


def test_envs_that_are_built_after_the_first_step_count_once_when_all_hold_theirs(
    recorder: Recorder, metrics: Metrics
) -> None:
    form(recorder, 1, A, B, C, restore=True)
    form(recorder, 2, A, B)
    recorder.take(messages.Stepped(key=A, generation=2, at_s=15.0, envs_owed=True), 15.0, 0.0)
    recorder.take(messages.EnvsHeld(key=A, generation=2, envs_s=3.0), 18.0, 0.0)
    recorder.take(messages.Stepped(key=B, generation=2, at_s=15.5, envs_owed=True), 18.5, 0.0)
    count, total = (
        f'rallypoint_recovery_seconds_{what}{{kind="forced",phase="envs"}}'
        for what in ("count", "sum")
    )
    assert value(metrics, count) == 0
    for _ in range(2):
        recorder.take(messages.EnvsHeld(key=B, generation=2, envs_s=2.0), 19.0, 0.0)
    recorder.close()
    assert (value(metrics, count), value(metrics, total)) == (1, 3.0)


def test_figures_of_all_ranks_are_counted_once_whoever_reports_them(
    recorder: Recorder, metrics: Metrics
) -> None:
    form(recorder, 1, A, B, restore=True)
    for key in (A, B):
        figures = {"skipped_steps": 2.0, "straggler_ratio": 1.5}
        recorder.take(committed(key, 1, {A: 60, B: 40}, metrics=figures), 0.0, 0.0)
    recorder.take(committed(A, 2, {A: 60}, metrics={"skipped_steps": 1.0}), 0.0, 0.0)
    recorder.close()
    assert value(metrics, "rallypoint_non_finite_total") == 3
    assert value(metrics, "rallypoint_straggler_ratio") == 1.5


def test_a_dead_worker_leaves_no_series(recorder: Recorder, metrics: Metrics) -> None:
    form(recorder, 1, A, B, restore=True)
    for key, rollout_s in ((A, 1.0), (B, 2.0)):
        activity = {"rollout": rollout_s, "update": 0.5}
        recorder.take(committed(key, 1, {A: 60, B: 40}, activity=activity), 0.0, 0.0)
    assert value(metrics, 'rallypoint_worker_rollout_seconds{slot="1"}') == 2.0
    recorder.worker_ended(B, 40, NO_LEDGER, by_agreement=False)
    recorder.worker_ended(WorkerKey("local", 1, 2), 0, NO_LEDGER, by_agreement=False)
    recorder.close()
    assert value(metrics, 'rallypoint_worker_rollout_seconds{slot="0"}') == 1.0
    text = prometheus_client.generate_latest(metrics.registry).decode()
    assert 'slot="1"' not in text
    assert "local/1" not in text


def test_ages_do_not_follow_the_calendar(
    recorder: Recorder, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(iteration: int) -> messages.CheckpointDone:
        return messages.CheckpointDone(
            key=A,
            generation=1,
            iteration=iteration,
            path="p",
            stall_s=0.0,
            persist_s=0.0,
            size_bytes=7,
        )

    form(recorder, 1, A, restore=True)
    monotonic, calendar = [1000.0], [2e9]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic[0])
    monkeypatch.setattr(time, "time", lambda: calendar[0])
    assert math.isnan(value(metrics, "rallypoint_checkpoint_age_seconds"))
    recorder.take(committed(A, 1, {A: 60}), 0.0, 0.0)
    recorder.take(done(1), 0.0, calendar[0])
    monotonic[0], calendar[0] = 1030.0, 1e9
    assert value(metrics, "rallypoint_checkpoint_age_seconds") == 30.0
    assert value(metrics, "rallypoint_progress_age_seconds") == 30.0
    recorder.take(done(4), 0.0, calendar[0])
    recorder.job_seen(JobRecord("u", "c", {}, formed=1, checkpoint=(1, 4)))
    monotonic[0] = 1040.0
    assert value(metrics, "rallypoint_checkpoint_age_seconds") == 10.0, "heard of before"
    recorder.job_seen(JobRecord("u", "c", {}, formed=1, checkpoint=(1, 9)))
    assert value(metrics, "rallypoint_checkpoint_age_seconds") == 0.0, "another node wrote it"
    assert value(metrics, "rallypoint_checkpoint_iteration") == 9
    assert value(metrics, "rallypoint_checkpoint_period_seconds") == 30.0
    assert value(metrics, "rallypoint_checkpoint_size_bytes") == 7
    recorder.close()
