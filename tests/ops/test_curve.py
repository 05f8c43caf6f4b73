"""The reward curve from a journal."""

import json
from pathlib import Path

import pytest

from rallypoint.ops import curve
from rallypoint.ops.curve import NoCurveError


def iteration(number: int, **metrics: float) -> str:
    line = {"event": "iteration", "iteration": number, "env_steps_total": 10 * number}
    return json.dumps({**line, "metrics": metrics})


def generation(number: int, at: int, cause: str, restore: bool = False) -> str:
    line = {"event": "generation", "generation": number, "iteration": at, "cause": cause}
    return json.dumps({**line, "restore": restore})


def test_what_a_restore_has_wound_back_is_drawn_as_it_was_redone() -> None:
    read = curve.read_curve(
        [
            generation(1, 0, "start", restore=True),
            iteration(1, reward_mean=0.1),
            iteration(2, reward_mean=0.1, episode_return_mean=1.0),
            iteration(3, reward_mean=0.1, episode_return_mean=9.0),
            '{"torn',
            generation(2, 2, "worker_lost", restore=True),
            iteration(3, reward_mean=0.1, episode_return_mean=2.0),
        ]
    )
    assert (read.env_steps, read.values) == ([20, 30], [1.0, 2.0])
    assert read.changes == [(20, "worker_lost")]


def test_without_ended_episodes_the_reward_is_drawn() -> None:
    read = curve.read_curve([iteration(1, reward_mean=0.5)])
    assert (read.figure, read.values) == ("reward_mean", [0.5])


@pytest.mark.parametrize("lines", [[], [generation(1, 0, "start")], ["nonsense", "[]"]])
def test_nothing_to_draw_is_said(lines: list[str]) -> None:
    with pytest.raises(NoCurveError):
        curve.read_curve(lines)


@pytest.mark.slow
def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curve.main([str(tmp_path)]) == 1
    assert "no curve" in capsys.readouterr().err
    (tmp_path / "journal.jsonl").write_text(iteration(1, reward_mean=0.5) + "\n")
    assert curve.main([str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
