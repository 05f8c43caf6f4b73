"""Jobs go on from a checkpoint of every schema version, at other world sizes and the other budget."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.trainer import fitting
from tests.checkpointing.test_checkpoint_schemas import FIXTURES

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

BOUND_S = 300.0


def settings(config: dict[str, dict[str, Any]]) -> list[str]:
    """Options that give a job what the checkpoint was made with, whatever the defaults are by now."""
    values = {
        f"{section}.{key}": "none" if value is None else json.dumps(value)
        for section, keys in config.items()
        for key, value in keys.items()
    }
    return [
        part
        for path, value in values.items()
        if fitting.agreed(path) or path == "env.block"
        for part in ("--set", f"{path}={value}")
    ]


@pytest.mark.parametrize(
    ("workers", "budget", "envs"), [(1, "per_rank", 16), (3, "global", 48)], ids=str
)
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_a_job_goes_on_from_it(
    fixture: Path, workers: int, budget: str, envs: int, tmp_path: Path
) -> None:
    (source,) = fixture.glob("*/manifest.json")
    manifest = json.loads(source.read_text())
    shutil.copytree(source.parent, tmp_path / "checkpoints" / source.parent.name)
    command = [sys.executable, "-m", "rallypoint.daemon.cli", "run", "--metrics-port", "0"]
    options = ["--dir", str(tmp_path / "run"), "--job", manifest["job"], "--workers", str(workers)]
    sizes = ["--set", f"env.budget={budget}", "--set", f"env.num_envs={envs}"]
    url = ["--set", f"checkpoint.url={tmp_path / 'checkpoints'}"]
    end = ["--iterations", str(manifest["iteration"] + 2)]
    done = subprocess.run(
        [*command, *options, *settings(manifest["config"]), *sizes, *url, *end],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    begin = next(line for line in lines if line["event"] == "generation" and line["restore"])
    assert begin["iteration"] == manifest["iteration"]
    assert begin["generation"] > manifest["generation"]
    trained = [line["iteration"] for line in lines if line["event"] == "iteration"]
    assert trained == [manifest["iteration"] + 1, manifest["iteration"] + 2]
