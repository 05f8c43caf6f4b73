"""``rallypoint env check``: words and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.daemon.cli import main
from tests.project import ROOT

CHECK = ("env", "check")


def test_the_documented_example_is_40_lines_and_keeps_every_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = (ROOT / "docs/examples/pendulum.py").read_text().splitlines()
    body = lines[lines.index("class Pendulum:") :]
    assert len([line for line in body if line.strip()]) <= 40
    assert main([*CHECK, "docs.examples.pendulum:make", "--rule", "spec", "--rule", "seed"]) == 0
    assert capsys.readouterr().out == "all 2 rules hold\n"


@pytest.mark.slow
def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "pendulum.py").write_text((ROOT / "docs/examples/pendulum.py").read_text())
    program = (
        "import sys; from rallypoint.daemon.cli import main; sys.path.remove(''); sys.exit(main())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, *CHECK, "pendulum:make", "--rule", "shapes"],
        check=False,
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (found.returncode, found.stdout) == (0, "all 1 rules hold\n"), found.stderr
    assert "actor 3; actions 1; episodes of at most 200 steps" in found.stderr


def test_what_is_broken_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tests.fakes.broken_envs:OneBuffer", "--rule", "aliasing", "--rule", "refusals"]
    assert main([*CHECK, *arguments]) == 1
    words = capsys.readouterr().out
    assert "aliasing: reward of step 1 and reward of step 0 are the same memory" in words
    assert words.endswith("1 of 2 rules are broken\n")
    assert main([*CHECK, *arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["task"], document["rules"]) == ("pointmass", ["aliasing", "refusals"])
    assert [finding["rule"] for finding in document["findings"]] == ["aliasing"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 2, "env.backend = 'nowhere' does not exist"),
        (["no_such_module:make"], 1, "No module named 'no_such_module'"),
        (["docs.examples.pendulum:make", "--envs", "2"], 2, "--envs 2 must be at least 4"),
        (["embedded", "--task", "chess"], 1, "env.task = 'chess' does not exist"),
        (["embedded", "--override", "x"], 1, "'x' should be name=value"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, *arguments]) == code
    assert words in capsys.readouterr().err
