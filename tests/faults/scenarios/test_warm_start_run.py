"""``rallypoint run --warm-start``: real runs, from the command line to the last bit of the parameters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.injectors.job import OPTIONS, WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def rallypoint(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "rallypoint.daemon.cli", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S, check=False)


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return rallypoint("run", "--dir", str(directory), *OPTIONS, "--workers", "2", *options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished at iteration 4."""
    directory = tmp_path_factory.mktemp("warm-start") / "source"
    done = run(directory, "--iterations", "4")
    assert done.returncode == 0, done.stderr
    return directory


def manifests(directory: Path) -> list[dict[str, object]]:
    found = [json.loads(path.read_text()) for path in directory.glob("checkpoints/*/manifest.json")]
    return sorted(found, key=lambda manifest: manifest["iteration"])


def test_a_new_job_begins_with_the_parameters_of_another(source: Path, tmp_path: Path) -> None:
    """Every iteration is what one process trains that begins with those parameters: the same hashes,
    so the workers had the same parameters, statistics, and fresh optimiser, bit for bit."""
    target = tmp_path / "target"
    one_rank = ("--workers", "1")  # a sum over ranks rounds otherwise
    done = run(target, "--iterations", "3", "--warm-start", str(source), *one_rank)
    assert done.returncode == 0, done.stderr
    (newest,) = (m for m in manifests(source) if m["iteration"] == 4)
    lines = [json.loads(line) for line in (target / "journal.jsonl").read_text().splitlines()]
    (begin,) = (line for line in lines if line["event"] == "generation" and line["restore"])
    assert begin["warm_start"].endswith(f"-{newest['attempt']}")
    assert begin["iteration"] == 0
    assert {manifest["warm_start"] for manifest in manifests(target)} == {begin["warm_start"]}
    assert f"begins with the parameters and statistics of {begin['warm_start']}" in done.stderr
    report = json.loads(rallypoint("reproduce", str(target), "--json").stdout)
    assert report["equal_hashes"] == report["iterations"] == 3
    resumed = run(target, "--iterations", "4", "--warm-start", "gone", *one_rank)
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on from its own state" in resumed.stderr
    assert manifests(target)[-1]["warm_start"] == begin["warm_start"]


def test_what_does_not_fit_is_refused_before_anything_starts(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = run(target, "--warm-start", str(source), "--set", "ppo.hidden=[16,8]")
    assert done.returncode == 2
    assert "model/actor.2.weight: [16, 16] in it, [8, 16] here" in done.stderr
    done = run(target, "--warm-start", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "nowhere: no committed checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert not target.exists()


def test_a_new_directory_on_the_same_url_is_refused_with_what_differs(
    source: Path, tmp_path: Path
) -> None:
    """Its own directory would refuse by ``state.json``; here only the checkpoint can tell."""
    before = manifests(source)
    url = ("--set", f"checkpoint.url={source / 'checkpoints'}", "--iterations", "6")
    done = run(tmp_path / "other", *url, "--set", "ppo.gamma=0.5")
    assert done.returncode == 1
    assert "ppo.gamma: 0.99 in it, 0.5 here" in done.stderr
    assert "program error" in done.stderr
    assert manifests(source) == before
