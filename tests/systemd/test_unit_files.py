"""The files under systemd/ as systemd's own checks see them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.daemon.shared.configload import load
from tests.project import ROOT

FOLDER = ROOT / "systemd"
UNIT = FOLDER / "rallypoint@.service"
EXPOSURE = 40
"""Tenths of systemd's exposure level (0 to 100) that the unit may not exceed: "OK" is below 50."""

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd is not installed: apt-get install systemd",
)


def analyze(*command: str) -> str:
    words = ("systemd-analyze", *command)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_analyze
@pytest.mark.slow
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "root/opt/rallypoint/bin/rallypoint"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/rallypoint", str(program.parents[1])))
    said = analyze("verify", "--man=no", str(unit.with_name("rallypoint@job.service")))
    assert unit.name.split("@")[0] not in said, said


@needs_analyze
@pytest.mark.slow
def test_the_unit_is_hardened() -> None:
    table = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(UNIT))
    assert "Overall exposure level" in table


def test_the_example_job_is_a_valid_configuration() -> None:
    loaded = load(FOLDER / "example.toml")
    assert loaded.config.job.iterations == 1000
    assert loaded.config.metrics.port == 9105


def test_what_the_example_has_in_comments_is_valid_too(tmp_path: Path) -> None:
    lines = (FOLDER / "example.toml").read_text().splitlines()
    uncommented = [re.sub(r"^# (?=\[|\w+ = )", "", line) for line in lines]
    file = tmp_path / "all.toml"
    file.write_text("\n".join(uncommented))
    config = load(file).config
    assert (config.node.name, config.node.interface) == ("gpu-1", "eth0")
    assert (config.job.max_workers, config.membership.backend) == (16, "etcd")
    assert config.membership.password_file is not None
    assert config.node.devices == tuple(range(8))
