"""The benchmark of preemption notices: what it makes of what it saw, and a real run of it."""

import json
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench.notice import Noticed, _document, line_text, text
from tests.fakes.etcd_server import system_binaries

SMALL = ("--task", "pointmass", "--set", "env.num_envs=16", "--set", "ppo.rollout_steps=8")
FINE = Noticed("n1", 75, 2.0, 0.0, survivors_kept=True)


@pytest.mark.parametrize(
    ("wrong", "held"),
    [
        (FINE, True),
        (Noticed("n1", 0, 2.0, 0.0, survivors_kept=True), False),
        (Noticed("n1", 75, 31.0, 0.0, survivors_kept=True), False),
        (Noticed("n1", 75, 2.0, 128.0, survivors_kept=True), False),
        (Noticed("n1", 75, 2.0, 0.0, survivors_kept=False), False),
    ],
)
def test_one_notice_that_cost_anything_is_enough(wrong: Noticed, held: bool) -> None:
    document = _document([FINE, wrong], [0.2, 0.1], 0.3)
    assert document["held"] is held
    assert text(document).splitlines()[-1].startswith("all left" if held else "NOT all left")


def test_the_stalls_are_shown_with_their_number() -> None:
    document = _document([FINE], [0.1 * n for n in range(1, 21)], 0.05)
    assert document["stall_s"]["count"] == 20
    assert document["stall_s"]["p95"] == pytest.approx(1.9)
    assert document["stall_s"]["most"] == pytest.approx(2.0)
    assert "p50 1.050 s" in text(document)
    assert "p50 -" in text(_document([FINE], [], 0.0))
    assert "n1 left after 2.00 s with exit code 75" in line_text(1, FINE)


def test_a_job_in_which_nobody_could_stay_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "notice", "--nodes", "1"]) == 2
    assert "at least 2 nodes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_notice(tmp_path: Path) -> None:
    system_binaries()
    output = tmp_path / "out.json"
    given = ("--nodes", "2", "--notices", "1", "--output", str(output))
    assert cli.main(["bench", "notice", *given, *SMALL]) == 0
    document = json.loads(output.read_text())
    assert (document["held"], document["env_steps_lost"]) == (True, 0)
    assert document["stall_s"]["count"] == 1
