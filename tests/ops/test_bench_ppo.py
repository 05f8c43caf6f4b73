"""The PPO benchmark: its arithmetic, processes that take turns, and a real small run of each side."""

import json
import sys
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench import ppo
from rallypoint.ops.bench.ppo import Round
from rallypoint.ops.bench.processes import BenchError
from rallypoint.ops.bench.turns import Player, Turn
from tests.fakes import rsl_rl_site

ABOUT = {"task": "pointmass", "num_envs": 16, "peer": "/somewhere"}
SMALL = (
    *("bench", "ppo", "--task", "pointmass", "--rounds", "2", "--iterations", "1"),
    *("--set", "env.num_envs=16", "--set", "ppo.hidden=[8]"),
)


def turn(seconds: float, update_s: float) -> Turn:
    return Turn(1000, seconds, update_s)


def test_ratios_are_taken_within_a_round_and_above_1_when_we_are_faster() -> None:
    rounds = [
        Round(turn(1.0, 0.25), turn(2.0, 0.5)),
        Round(turn(4.0, 1.0), turn(4.0, 2.0)),
        Round(turn(2.0, 1.0), turn(1.0, 0.5)),
    ]
    found = ppo.document(rounds, 5, ABOUT)
    expected = {"env_steps_per_s": 1.0, "rollout_s": 2 / 3, "update_s": 2.0}
    assert found["ratio"] == pytest.approx(expected)
    assert found["ours"] == {"env_steps_per_s": 500.0, "rollout_s": 0.2, "update_s": 0.2}
    assert "2.000" in ppo.text(found)


def test_without_a_peer_there_is_no_ratio() -> None:
    found = ppo.document([Round(turn(1.0, 0.25), None)], 5, ABOUT)
    assert (found["theirs"], found["ratio"]) == (None, None)
    assert "no RSL-RL in /somewhere" in ppo.text(found)


@pytest.mark.parametrize("setting", ["ppo.dtype=float64", "ppo.max_grad_norm=none"])
def test_what_rsl_rl_cannot_do_alike_is_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "ppo", "--set", setting]) == 2
    assert setting.split("=")[0] in capsys.readouterr().err


def player(directory: Path, made: str, played: str) -> Player:
    """A process of its own, which prints while it is made."""
    code = (
        "from rallypoint.ops.bench.turns import Turn, serve\n"
        f"def play(iterations):\n    {played}\n"
        f"def make():\n    print('hello')\n    {made}\n    return play\n"
        "serve(make)\n"
    )
    return Player("the other", [sys.executable, "-c", code], directory / "log")


def test_what_a_trainer_prints_is_no_answer(tmp_path: Path) -> None:
    with player(tmp_path, "pass", "return Turn(iterations, 1.0, 0.5)") as one:
        assert [one.play(3), one.play(4)] == [Turn(3, 1.0, 0.5), Turn(4, 1.0, 0.5)]
    assert "hello" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("made", "played"),
    [("raise SystemExit('no env')", "pass"), ("pass", "raise SystemExit('no env')")],
    ids=["made", "played"],
)
def test_a_trainer_that_dies_is_quoted(tmp_path: Path, made: str, played: str) -> None:
    with player(tmp_path, made, played) as one, pytest.raises(BenchError, match="no env"):
        one.play(1)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_real_run_without_rsl_rl_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "ppo.json"
    assert cli.main([*SMALL, "--peer", str(tmp_path), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert len(found["rounds"]["ours"]) == 2
    assert min(found["ours"].values()) > 0
    assert found["theirs"] is None
    assert f"no RSL-RL in {tmp_path}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_real_run_beside_rsl_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--peer", str(rsl_rl_site.installed()), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rounds"]["theirs"]) == 2
    for name, ratio in found["ratio"].items():
        assert ratio > 0, name
        assert found["theirs"][name] > 0
