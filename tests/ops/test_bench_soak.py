"""The soak: what it makes of what it saw, and a short real one."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench import report, resources
from rallypoint.ops.bench.job import JournalReader
from rallypoint.ops.bench.resources import Usage, growth
from rallypoint.ops.bench.soak import KINDS, Blow, Lineage, Soak, draw_kinds

SETTINGS = {"workers": 3, "task": "pointmass", "seed": 1, "settings": [], "kills": 2}
MIB = 2**20


def iteration(number: int, generation: int = 1) -> dict[str, Any]:
    return {"event": "iteration", "generation": generation, "iteration": number}


def generation(number: int, *, restore: bool = False) -> dict[str, Any]:
    return {"event": "generation", "generation": number, "restore": restore}


# --- what must hold ----------------------------------------------------------------------------------


def test_each_iteration_comes_once_and_in_order() -> None:
    lineage = Lineage()
    sound = [
        generation(1, restore=True),
        iteration(1),
        iteration(2),
        generation(3),
        iteration(3, 3),
    ]
    assert lineage.follow(sound) == []
    assert (lineage.generation, lineage.iteration) == (3, 3)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        pytest.param(iteration(4), "iteration 4 follows 2", id="skipped"),
        pytest.param(iteration(2), "iteration 2 follows 2", id="repeated"),
        pytest.param(generation(2), "generation 2 follows 2", id="generation repeated"),
        pytest.param(generation(3, restore=True), "restored", id="state lost"),
    ],
)
def test_a_broken_line_is_named(line: dict[str, Any], wrong: str) -> None:
    lineage = Lineage()
    assert lineage.follow([generation(2, restore=True), iteration(1), iteration(2)]) == []
    (said,) = lineage.follow([line])
    assert wrong in said


def test_a_line_torn_by_the_end_of_its_writer_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "iter\n{"event": "iteration"}\n')
    assert JournalReader(path).read() == [{"event": "iteration"}]


@pytest.mark.parametrize("measure", resources.MEASURES)
def test_steady_growth_is_found_and_noise_is_not(measure: resources.Measure) -> None:
    steady = {"fds": 40, "threads": 6, "rss_bytes": 60 * MIB}
    step = {"fds": 1, "threads": 1, "rss_bytes": MIB}[measure]
    noise = [Usage(**{**steady, measure: steady[measure] + step * (n % 2)}) for n in range(50)]
    leak = [Usage(**{**steady, measure: steady[measure] + step * n // 4}) for n in range(50)]
    calm, found = growth(noise), growth(leak)
    assert calm is not None
    assert found is not None
    assert not any(one.grows for one in calm.values())
    assert [name for name, one in found.items() if one.grows] == [measure]
    assert growth(leak[: resources.LEAST_SAMPLES - 1]) is None


def test_what_a_process_holds_is_read_from_the_kernel() -> None:
    before = resources.usage(os.getpid())
    with Path(__file__).open():
        during = resources.usage(os.getpid())
    assert before is not None
    assert during is not None
    assert during.fds == before.fds + 1
    assert during.threads >= 1
    assert during.rss_bytes > MIB


def test_a_process_that_is_gone_holds_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert resources.usage(ended.pid) is None


def test_every_kind_of_kill_comes_and_the_supervisor_only_in_the_second_half() -> None:
    rng = random.Random(1)  # noqa: S311 - no secret
    kinds = draw_kinds(200, 3, rng)
    assert len(kinds) == 200
    assert {kind for kind in kinds[:100] if kind.startswith("supervisor")} == set()
    assert {kind: kinds.count(kind) for kind in KINDS} == {
        "one worker": 135,
        "two workers": 40,
        "supervisor": 13,
        "supervisor and worker": 12,
    }
    assert "two workers" not in draw_kinds(200, 2, rng), "one has to survive"
    assert {"one worker", "two workers", "supervisor"} == set(draw_kinds(10, 3, rng))


# --- report ------------------------------------------------------------------------------------------


def test_a_document_names_what_did_not_hold() -> None:
    leak = [Usage(40 + n, 6, 60 * MIB) for n in range(30)]
    soak = Soak(
        blows=[Blow("one worker", ("local/1#1 (training)",), 0.5), Blow("supervisor", (), None)],
        violations=["iteration 4 follows 2"],
        samples={"supervisor, first half": leak, "worker 0, first half": leak[:3]},
        iterations=9,
        generations=4,
    )
    document = report.soak_document(soak, SETTINGS)
    assert json.loads(json.dumps(document))["violations"] == ["iteration 4 follows 2"]
    assert (document["dealt"], document["went_on"]) == (2, 1)
    assert document["still_s"]["one worker"]["max"] == 0.5
    text = report.soak_text(document)
    assert "1 of 2 kills survived" in text
    assert "violation: iteration 4 follows 2" in text
    assert "too few samples" in text
    assert "60.0 -> 60.0" in text


# --- command -----------------------------------------------------------------------------------------


def test_a_world_of_one_cannot_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "soak", "--workers", "1"]) == 2
    assert "at least 2 workers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_short_soak_holds(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rallypoint.daemon.cli", "bench", "soak", "--kills", "6"),
            *("--output", str(output), "--set", "ppo.hidden=[8]", "--set", "env.num_envs=16"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["went_on"] == document["dealt"] == 6
    assert document["violations"] == []
    assert document["hash_mismatches"] == 0
    assert document["iterations"] >= 6 * 5
    assert {blow["kind"] for blow in document["blows"]} >= {"one worker", "supervisor"}
    assert "6 of 6 kills survived" in done.stdout
