"""A real run keeps the last, the multiples and the best of its checkpoints, by its own journal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.injectors.job import OPTIONS, WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]

FIGURE = "reward_mean"


def test_a_run_keeps_what_its_rules_want(tmp_path: Path) -> None:
    rules = {"every_iterations": 1, "keep_last": 1, "keep_every": 5, "keep_best": 2}
    options = [x for k, v in rules.items() for x in ("--set", f"checkpoint.{k}={v}")]
    command = [sys.executable, "-m", "rallypoint.daemon.cli", "run", "--dir", str(tmp_path / "run")]
    done = subprocess.run(
        [
            *command,
            *OPTIONS,
            *("--workers", "1", "--iterations", "12"),
            *options,
            *("--set", f"checkpoint.keep_best_metric={FIGURE}"),
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifests = [
        json.loads(p.read_text()) for p in (tmp_path / "run").glob("checkpoints/*/manifest.json")
    ]
    left = {manifest["iteration"]: manifest for manifest in manifests}
    log = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    # One that is due while another is in flight may be replaced by the next.
    committed = {x["iteration"] for x in log if x["event"] == "checkpoint_committed"}
    lines = [json.loads(x) for x in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    figures = {x["iteration"]: x["metrics"][FIGURE] for x in lines if x["event"] == "iteration"}
    rated = [i for i in committed if i in figures and (i != 12 or left[12]["metrics"])]
    best = sorted(rated, key=figures.__getitem__)[-2:]
    assert set(left) == {12, *(i for i in committed if i % 5 == 0), *best}
    assert len(committed) > len(left)
