"""The supervisor as a process, real worker processes without torch, real signals."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.executors import proctable
from rallypoint.daemon.executors.metrictable import TABLE
from tests.fakes.supervised import Status, Supervised, pids, supervised, trains

pytestmark = [pytest.mark.slow]

STATUS_KEYS = {
    *("job", "state", "generation", "world_size", "iteration", "env_steps", "num_envs"),
    *("reason", "metrics_url", "warm_start", "workers", "last_change", "checkpoint"),
}
WORKER_KEYS = {
    *("node", "slot", "pid", "rank", "incarnation", "state", "committed_iteration", "num_envs"),
}
PHASES = {"detect", "release", "plan", "group", "sync", "envs", "first_step", "total"}


def iterations(run: Supervised) -> list[dict[str, Any]]:
    return [line for line in run.journal() if line["event"] == "iteration"]


def hangs(status: Status) -> bool:
    """The worker of slot 1 is stopped in the middle of an iteration."""
    pid = pids(status)[1]
    entry = None if pid is None else proctable.read(pid)
    return entry is not None and entry.state == "T"


def test_a_run_finishes_and_its_journal_counts_every_iteration_once(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", "--iterations", "12") as run:
        assert run.process.wait(60) == 0
        assert [line["iteration"] for line in iterations(run)] == list(range(1, 13))
        assert len({line["state_hash"] for line in iterations(run)}) == 12
        assert run.journal()[0]["event"] == "generation"
        assert run.logged("supervisor_ended")[0]["code"] == 0
        assert not run.logged("state_hash_conflict")
    with supervised(tmp_path / "run", "--iterations", "12") as again:
        assert again.process.wait(60) == 0, "a finished job has nothing left to do"
        assert len(iterations(again)) == 12
        assert not again.logged("worker_started")[2:]


def test_status_has_exactly_the_promised_schema(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        early = run.wait_for(lambda s: s["generation"] is None or s["generation"] > 0)
        trained = run.wait_for_training(2)
        for status in (early, trained):
            assert set(status) == STATUS_KEYS
            assert all(set(worker) == WORKER_KEYS for worker in status["workers"])
            assert set(status["last_change"]) == {"kind", "cause", "generation", "seconds"}
            assert set(status["last_change"]["seconds"]) == PHASES
            assert set(status["checkpoint"]) == {"iteration", "path", "age_seconds"}
        assert trained["job"] == "default"
        assert trained["state"] == "running"
        assert trained["num_envs"] == 256
        assert [w["num_envs"] for w in trained["workers"]] == [128, 128]
        assert sorted(w["rank"] for w in trained["workers"]) == [0, 1]
        assert trained["metrics_url"].endswith("/metrics")
        assert run.end() == 0


def test_numeric_31_a_killed_worker_comes_back_and_the_others_keep_their_process(
    tmp_path: Path,
) -> None:
    worker = {"faults": [["die", 1, 1, 5]]}
    with supervised(tmp_path / "run", "--workers", "3", worker=worker) as run:
        after = run.wait_for(lambda s: trains(s, 3) and s["workers"][1]["incarnation"] == 2)
        exits = run.logged("worker_exited")
        assert [(e["worker"], e["reason"]) for e in exits] == [("local/1#1", "killed by SIGKILL")]
        started = {e["worker"]: e["pid"] for e in run.logged("worker_started")}
        assert pids(after)[0] == started["local/0#1"]
        assert pids(after)[2] == started["local/2#1"]
        formed = [line for line in run.journal() if line["event"] == "generation"]
        changes = [(g["kind"], g["cause"]) for g in formed]
        lost = changes.index(("forced", "worker_lost"))
        assert set(changes[lost + 1 :]) == {("planned", "join")}
        assert formed[-1]["world_size"] == 3
        published = run.logged("generation_published")
        assert {g["world_size"] for g in published} == {2, 3}
        for g in published:  # per rank: the batch grows and shrinks with the ranks
            assert g["env_steps_per_iteration"] == g["world_size"] * 128 * 24
        values = run.metrics()
        assert values['worker_restarts_total{reason="signal"}'] == 1
        # It died in the middle of iteration 5: that rollout, and nothing else, is lost.
        assert values['env_steps_lost_total{reason="died"}'] == 128 * 24
        recovery = 'recovery_seconds_count{kind="forced",phase="total"}'
        assert values[recovery] >= 1
        assert run.end() == 0
        numbers = [line["iteration"] for line in iterations(run)]
        assert numbers == list(range(1, len(numbers) + 1))


def test_all_killed_at_once_restore_from_the_checkpoint(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        before = run.wait_for_training(2)
        for pid in pids(before).values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        after = run.wait_for(
            lambda s: trains(s, 2) and s["generation"] > before["generation"] and s["iteration"]
        )
        assert not set(pids(before).values()) & set(pids(after).values())
        restoring = [line for line in run.journal() if line.get("restore")]
        assert len(restoring) == 2, "at the start, and after the loss"
        saved = [line["iteration"] for line in run.logged("checkpoint_committed")]
        assert restoring[1]["iteration"] in saved
        assert restoring[1]["iteration"] >= before["checkpoint"]["iteration"]
        assert run.end() == 0


def test_an_exception_is_named_and_a_repeated_one_fails_the_job(tmp_path: Path) -> None:
    faults = [["raise", slot, life, 4] for slot in (0, 1) for life in range(1, 6)]
    with supervised(tmp_path / "run", worker={"faults": faults}) as run:
        assert run.process.wait(60) == 1
        reason = run.logged("supervisor_ended")[0]["reason"]
        assert "ValueError" in reason
        assert run.logged("worker_fault")[0]["traceback"] == "Traceback: a fake error"


def test_a_worker_that_exits_leaves_its_last_lines_in_the_log(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", worker={"faults": [["exit", 0, 1, 3]]}) as run:
        run.wait_for(lambda s: trains(s, 2) and s["workers"][0]["incarnation"] == 2)
        ended = run.logged("worker_exited")[0]
        assert ended["reason"] == "exit code 3"
        assert ended["output_tail"] == ["about to exit with code 3"]
        assert run.metrics()['worker_restarts_total{reason="error"}'] == 1
        assert run.end() == 0


def test_a_worker_that_must_not_go_on_restarts_cold_and_is_counted_as_that(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", worker={"faults": [["cold", 1, 1, 3]]}) as run:
        run.wait_for(lambda s: trains(s, 2) and s["workers"][1]["incarnation"] == 2)
        assert run.metrics()['worker_restarts_total{reason="cold"}'] == 1
        assert run.end() == 0


def test_a_newcomer_that_dies_while_it_warms_up_is_tried_again(tmp_path: Path) -> None:
    faults = [["die", 1, life, 0] for life in (1, 2)]
    with supervised(tmp_path / "run", worker={"faults": faults}) as run:
        after = run.wait_for(lambda s: trains(s, 2) and s["workers"][1]["incarnation"] == 3)
        assert after["workers"][0]["incarnation"] == 1
        ends = [e["worker"] for e in run.logged("worker_exited")]
        assert ends == ["local/1#1", "local/1#2"]
        assert run.metrics()['env_steps_lost_total{reason="died"}'] == 0
        assert run.end() == 0


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        pytest.param([["garbage", 1, 1, 3]], "frame of", id="no message"),
        pytest.param([["lie", 1, 1, 0]], "newest that was published", id="of no generation"),
        pytest.param(
            [["die", 1, 1, 3], ["lie", 1, 2, 0]], "'warming'", id="where it may not stand"
        ),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_ended_and_the_supervisor_goes_on(
    tmp_path: Path, faults: list[list[Any]], words: str
) -> None:
    liar = f"local/1#{len(faults)}"
    together = ("--set", "job.min_workers=2")  # nothing is planned before the first lie
    with supervised(tmp_path / "run", *together, worker={"faults": faults}) as run:
        after = run.wait_for(
            lambda s: trains(s, 2) and s["workers"][1]["incarnation"] == len(faults) + 1
        )
        assert after["workers"][0]["incarnation"] == 1
        (killed,) = run.logged("worker_killed")
        assert killed["worker"] == liar
        assert killed["reason"].startswith("protocol fault: ")
        assert words in killed["reason"]
        assert liar in {line["worker"] for line in run.logged("control_client_dropped")}
        assert run.metrics()['worker_restarts_total{reason="protocol"}'] == 1
        assert run.end() == 0
        assert max(line["iteration"] for line in iterations(run)) < 10**6, "nobody believed it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_numeric_37_a_signal_stops_by_agreement_with_a_checkpoint(
    tmp_path: Path, number: int
) -> None:
    with supervised(tmp_path / "run") as run:
        run.wait_for_training(2)
        assert run.end(number) == 0
        saved = run.logged("checkpoint_committed")[-1]["iteration"]
        assert saved == iterations(run)[-1]["iteration"]
        assert run.workers() == []


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", worker={"faults": [["hang", 1, 1, 3]]}) as run:
        run.wait_for(hangs)
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda s: any(w["state"] == "draining" for w in s["workers"]))
        assert run.end(signal.SIGTERM) == 0
        assert run.logged("killed_at_once")
        assert run.workers() == []


def test_stop_and_drain_wait_for_the_end(tmp_path: Path) -> None:
    for command in ("stop", "drain"):
        directory = tmp_path / command
        with supervised(directory) as run:
            run.wait_for_training(2)
            assert main([command, "--dir", str(directory)]) == 0
            assert run.process.wait(60) == 0
            assert main([command, "--dir", str(directory)]) == 3


def test_metrics_have_all_label_values_before_anything_happens(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        run.wait_for(lambda s: True)
        values = run.metrics()
        for spec in TABLE:
            for label, choices in spec.labels.items():
                for choice in choices:
                    assert any(
                        name.startswith(spec.name) and f'{label}="{choice}"' in name
                        for name in values
                    ), (spec.name, label, choice)
        assert not [name for name in values if "_created" in name]
        run.wait_for_training(2)
        values = run.metrics()
        assert values["train_reward_mean"] == 0.5
        assert values['job_state{state="running"}'] == 1
        assert values['job_state{state="starting"}'] == 0
        assert (values["slots"], values["world_size_wanted"]) == (2, 2)
        assert (values["leader"], values["store_trouble"]) == (1, 0)
        assert math.isnan(values["lease_margin_seconds"]), "no lease in one process"
        assert values["process_resident_memory_bytes"] > 0
        assert run.end() == 0


def test_the_supervisor_is_small(tmp_path: Path) -> None:
    with supervised(tmp_path / "run") as run:
        run.wait_for_training(2)
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 80 * 1024
        maps = Path(f"/proc/{run.process.pid}/maps").read_text()
        assert not [name for name in ("torch", "numpy", "mujoco") if f"/{name}/" in maps]
        assert run.end() == 0


def test_importing_the_daemon_loads_nothing_heavy() -> None:
    code = (
        "import sys, rallypoint.daemon.cli, rallypoint.daemon.commands.run\n"
        "print(sorted(n for n in ('torch', 'numpy', 'mujoco', 'matplotlib') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_state_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    with supervised(tmp_path / "run", "--iterations", "3") as run:
        assert run.process.wait(60) == 0
        state = json.loads(run.rundir.state.read_text())
        assert state["job"]["state"] == "finished"
        assert state["job"]["iteration"] == 3
        assert state["generation"] >= 1
