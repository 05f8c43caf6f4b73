"""The recovery benchmark: what it makes of what it saw, and a real run of it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.ops.bench import network, noderecovery, nodereport, peer, report, sampling
from rallypoint.ops.bench.job import JournalReader
from rallypoint.ops.bench.nodepeer import PeerLoss
from rallypoint.ops.bench.noderecovery import NodeLoss, NodeRun
from rallypoint.ops.bench.peer import PeerKill
from rallypoint.ops.bench.recovery import (
    PHASES,
    Kill,
    Recovery,
    entry_stalls,
    phase_seconds,
)
from rallypoint.ops.bench.sampling import PageWatch, Sample
from tests.fakes.etcd_server import system_binaries

SETTINGS = {"workers": 2, "task": "pointmass", "seed": 1, "settings": []}


def kill(total_s: float | None, *, rollout_s: float | None = 0.0) -> Kill:
    """A kill that took ``total_s``; None: nobody recovered from it."""
    seconds = dict.fromkeys(PHASES) | {"total": total_s}
    recovered = total_s is not None
    return Kill("local/1#3", "update", recovered, 4, seconds, rollout_s, recovered, total_s)


def recovery(*kills: Kill, error: str | None = None) -> Recovery:
    return Recovery(kills, step_s=0.01, hash_mismatches=0, iterations=50, error=error)


# --- from the journal and the pages ----------------------------------------------------------------


def test_phases_count_from_the_kill() -> None:
    line = {
        "seconds": {**dict.fromkeys(PHASES, 0.5), "envs": None, "detect": 0.0, "total": 9.0},
        "noticed_s": 100.01,
        "decided_s": 100.02,
        "published_s": 100.05,
        "stepped": [{"slot": 0, "at_s": 100.2}, {"slot": 2, "at_s": 100.3}],
    }
    seconds = phase_seconds(line, kill_s=100.0)
    assert seconds["detect"] == pytest.approx(0.02)
    assert seconds["plan"] == pytest.approx(0.03)
    assert seconds["total"] == pytest.approx(0.3)  # the last survivor's
    assert seconds["envs"] is None
    assert seconds["group"] == 0.5


def test_the_time_of_a_step_leaves_rollouts_out() -> None:
    steps = [Sample(1.0 + 0.01 * n, 64, n) for n in range(4)]
    samples = [Sample(0.2, 32, 0), Sample(0.9, 64, 0), *steps[1:], Sample(5.0, 96, 3)]
    assert sampling.step_seconds(samples) == [pytest.approx(0.01)]
    assert sampling.step_seconds(samples[:2]) == []


@pytest.mark.parametrize(
    ("begin_s", "end_s", "expected_s"),
    [
        pytest.param(0.0, 9.0, 0.4, id="whole: four env steps of 0.1 s"),
        pytest.param(1.15, 9.0, 0.25, id="killed in the middle of it"),
        pytest.param(2.0, 9.0, 0.0, id="killed after it"),
        pytest.param(0.0, 1.25, 0.2, id="until the first optimiser step"),
    ],
)
def test_the_time_of_a_rollout_between_two_moments(
    begin_s: float, end_s: float, expected_s: float
) -> None:
    samples = [Sample(0.0, 0, 5), *(Sample(1.1 + 0.1 * n, 32 * (n + 1), 5) for n in range(4))]
    found_s = sampling.rollout_seconds(samples, begin_s, end_s)
    assert found_s == pytest.approx(expected_s)


def test_a_watch_keeps_only_changes(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    page = SlotPage(rundir.page(0), create=True)
    watch = PageWatch(rundir, [0])
    for now, steps in enumerate([0, 0, 7, 7]):
        page.put(optimiser_steps=steps)
        watch.look(float(now))
    assert watch.samples == {0: [Sample(0.0, 0, 0), Sample(2.0, 0, 7)]}
    watch.close()
    page.close()


def test_a_line_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    assert reader.read() == []
    path.write_text('{"event":"iteration"}\n{"event":"gen')
    assert reader.read() == [{"event": "iteration"}]
    with path.open("a") as file:
        file.write('eration"}\n')
    assert reader.read() == [{"event": "generation"}]
    assert len(reader.lines) == 2


def test_an_entry_stalls_by_what_the_first_iteration_takes_longer() -> None:
    def commit(generation: int, unix_s: float) -> dict[str, Any]:
        return {"event": "iteration", "generation": generation, "unix_s": unix_s}

    def formed(generation: int, cause: str) -> dict[str, Any]:
        return {"event": "generation", "generation": generation, "cause": cause}

    lines = [
        *(formed(1, "start"), commit(1, 0.0), commit(1, 1.0)),
        *(formed(2, "worker_lost"), commit(2, 2.3), commit(2, 3.3)),
        *(formed(3, "join"), commit(3, 4.8), commit(3, 5.8), commit(3, 6.7), commit(3, 7.8)),
        *(formed(4, "worker_lost"), formed(5, "join"), commit(5, 9.0)),  # over before a second one
    ]
    assert entry_stalls(lines) == [pytest.approx(0.5)]


# --- report ------------------------------------------------------------------------------------------


def test_percentiles_are_of_the_values_that_are_there() -> None:
    figures = report.summary([*map(float, range(1, 21)), None])
    assert figures == {"n": 20, "p50": 10.5, "p95": pytest.approx(19.05), "max": 20.0}
    assert report.summary([None]) == {"n": 0, "p50": None, "p95": None, "max": None}


def test_a_document_takes_the_step_and_the_rollout_off() -> None:
    found = recovery(kill(0.2, rollout_s=0.05), kill(0.4, rollout_s=0.15))
    document = report.recovery_document(found, [PeerKill(20.0, 30.0, 2)], SETTINGS)
    assert document["seconds"]["total"]["p50"] == pytest.approx(0.3)
    assert document["beyond_step"]["p50"] == pytest.approx(0.29)
    assert document["beyond_step_and_rollout"]["p50"] == pytest.approx(0.19)
    assert document["peer"]["ratio"] == pytest.approx(100.0)
    assert document["recovered"] == 2
    assert json.loads(json.dumps(document)) == document
    text = report.recovery_text(document)
    assert "2 of 2 kills recovered" in text
    assert "torchrun" in text
    assert all(phase in text for phase in PHASES)


def test_a_kill_without_recovery_is_named_and_not_averaged() -> None:
    lost = kill(None)
    document = report.recovery_document(recovery(kill(0.2), lost, error="too slow"), [], SETTINGS)
    assert document["recovered"] == 1
    assert document["seconds"]["total"]["n"] == 1
    assert document["peer"] is None
    assert "ended early: too slow" in report.recovery_text(document)
    assert "NOT RECOVERED" in report.kill_text(2, lost)


def test_a_peer_that_does_not_come_back_counts_as_the_bound() -> None:
    peers = [PeerKill(None, None, 0)]
    document = report.recovery_document(recovery(kill(0.5)), peers, SETTINGS)
    assert document["peer"]["not_back"] == 1
    assert document["peer"]["ratio"] == pytest.approx(peer.BOUND_S / 0.5)
    assert "120 times our total p50 or more" in report.recovery_text(document)


def test_a_peer_is_back_when_all_ranks_of_one_attempt_train() -> None:
    def step(attempt: int, at_s: float) -> dict[str, Any]:
        return {"attempt": attempt, "at_s": at_s}

    before = [step(0, 1.0), step(0, 1.1)]
    half = [*before, step(1, 15.0)]
    assert peer.summarise(before, 10.0, 2) == PeerKill(None, None, 0)
    assert peer.summarise(half, 10.0, 2) == PeerKill(5.0, None, 1)
    assert peer.summarise([*half, step(2, 20.0), step(2, 21.0)], 10.0, 2) == PeerKill(5.0, 11.0, 2)


# --- command -----------------------------------------------------------------------------------------


def test_a_world_of_one_has_no_survivors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "recovery", "--workers", "1"]) == 2
    assert "at least 2 workers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_real_kills_are_recovered_from(tmp_path: Path) -> None:
    output = tmp_path / "recovery.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rallypoint.daemon.cli", "bench", "recovery", "--no-peer"),
            *("--kills", "2", "--workers", "2", "--task", "pointmass", "--output", str(output)),
            *("--set", "ppo.hidden=[8]", "--set", "env.num_envs=16"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["recovered"] == document["survivors_kept"] == 2
    assert document["hash_mismatches"] == 0
    assert document["error"] is None
    assert document["optimiser_step_s"] > 0
    assert [one["recovered"] for one in document["kills"]] == [True, True]
    for one in document["kills"]:
        assert one["seconds"]["total"] > 0
        assert one["seconds"]["group"] is not None
        assert one["back_s"] > one["seconds"]["total"]  # the replacement came, and came later
    assert document["kills"][0]["generation"] < document["kills"][1]["generation"]
    assert "2 of 2 kills recovered" in done.stdout


# --- nodes -------------------------------------------------------------------------------------------


def node_loss(drill: noderecovery.Drill, total_s: float | None) -> NodeLoss:
    return NodeLoss(drill, 3.0, "n1", 1, total_s, 4, total_s is not None, 9.0)


def test_a_document_of_nodes_has_a_case_for_each_drill_with_its_goal_and_ratio() -> None:
    losses = (node_loss("killed", 0.2), node_loss("killed", 0.4), node_loss("silent", 3.5))
    peers: dict[noderecovery.Drill, list[PeerLoss]] = {"killed": [PeerLoss(30.0)], "silent": []}
    peers["silent"] = [PeerLoss(None)]
    document = nodereport.document([NodeRun(losses)], peers, {**SETTINGS, "nodes": 3})
    assert json.loads(json.dumps(document)) == document
    killed, silent = document["cases"]
    assert (killed["drill"], killed["goal_s"], killed["survivors_kept"]) == ("killed", 1.5, 2)
    assert (silent["drill"], silent["goal_s"], silent["peer_not_back"]) == ("silent", 4.0, 1)
    assert killed["ratio"] == pytest.approx(100.0)
    text = nodereport.text(document)
    assert "node silent, detect_s 3" in text
    assert ">60.0" in text
    assert "survivors kept their process in 3 of 3" in text


def test_a_node_loss_without_recovery_is_named() -> None:
    lost = NodeRun((node_loss("killed", None),), "no step within 60 s")
    document = nodereport.document([lost], {}, {**SETTINGS, "nodes": 3})
    assert document["cases"][0]["total"]["n"] == 0
    assert "ended early: no step" in nodereport.text(document)
    assert "needs network namespaces" in nodereport.text(document)
    assert "NOT RECOVERED" in nodereport.loss_text(lost.losses[0])


def test_two_nodes_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "recovery", "--nodes", "2"]) == 2
    assert "at least 3 nodes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_real_nodes_are_lost_and_come_back(tmp_path: Path) -> None:
    system_binaries()
    output = tmp_path / "nodes.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rallypoint.daemon.cli", "bench", "recovery", "--no-peer"),
            *("--nodes", "3", "--kills", "1", "--detect-s", "2", "--task", "pointmass"),
            *("--output", str(output), "--set", "ppo.hidden=[8]", "--set", "env.num_envs=16"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    drills = list(noderecovery.DRILLS) if network.possible() else ["killed"]
    assert [loss["drill"] for loss in document["losses"]] == drills
    for loss in document["losses"]:
        assert loss["survivors_kept"]
        assert 0 < loss["total_s"] < loss["back_s"]
    if "silent" in drills:
        assert document["losses"][1]["total_s"] > 1.0, "nothing but the lease shows it"
    assert "node killed, detect_s 2" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not network.possible(), reason="network namespaces need root and iproute2")
def test_a_benchmark_that_is_ended_leaves_no_network_behind(tmp_path: Path) -> None:
    system_binaries()
    log = tmp_path / "log"
    with log.open("wb") as output:
        bench = subprocess.Popen(
            [
                *(sys.executable, "-m", "rallypoint.daemon.cli", "bench", "recovery"),
                *("--nodes", "3", "--task", "pointmass", "--no-peer"),
            ],
            stdout=output,
            stderr=output,
        )
    mine = f"rallypoint-bench-{bench.pid}-"
    deadline_s = time.monotonic() + 60.0
    while f"{mine}n2" not in namespaces():
        assert bench.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, "no network was made"
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(60.0) == 128 + signal.SIGTERM, log.read_text()
    assert mine not in namespaces()


def namespaces() -> str:
    return " ".join(path.name for path in Path("/run/netns").glob("*"))
