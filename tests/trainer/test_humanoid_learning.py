"""``humanoid-track`` is learned by two workers in minutes, and its sampler goes where it fails."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops.sampling import read_sampling
from rallypoint.trainer.envs.motions import CLIPS
from rallypoint.trainer.evaluate import COMMAND
from tests.fakes.command import run_command

ITERATIONS = 220
BOUND_S = 900.0
"""Of the whole run, on cores that other tests use too."""
STEPPING = {clip.name for clip in CLIPS if clip.stepping}


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_it_learns_to_track_every_clip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rallypoint.daemon.cli", "run", "--dir", str(directory)),
            *("--workers", "2", "--iterations", str(ITERATIONS), "--metrics-port", "0"),
            *("--set", "env.task=humanoid-track"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run_command(COMMAND, str(directory), "--episodes", "96", "--json")
    clips = {clip["clip"]: clip for clip in json.loads(capsys.readouterr().out)["clips"]}
    assert {name for name, clip in clips.items() if clip["survival"] < 0.95} == set()
    far = {
        name: (clip["rmse_rad"], clip["zero_rmse_rad"])
        for name, clip in clips.items()
        if name not in STEPPING and clip["rmse_rad"] > 0.5 * clip["zero_rmse_rad"]
    }
    assert far == {}

    sampling = read_sampling(RunDir(directory))
    stepping = np.array(
        [sampling.library.clips[c] in STEPPING for c in sampling.library.clip_of_bin]
    )
    assert sampling.failure_rate[stepping].mean() > sampling.failure_rate[~stepping].mean()
    assert sampling.over_frames[stepping].mean() > 1.0 > sampling.over_frames[~stepping].mean()
    assert sampling.over_frames.max() > 1.5
    assert sampling.entropy[-1] < sampling.entropy[0]
