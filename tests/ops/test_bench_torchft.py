"""The benchmark of torchft: what it makes of what it saw, and, where torchft is installed, a real run."""

import importlib.util
import json
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench.ftpeer import Blow, document, line_text, text, together


def step(pid: int, at_s: float, world: int = 2) -> dict[str, float]:
    return {"pid": pid, "at_s": at_s, "world": world}


def test_all_have_stepped_when_the_last_of_them_has_in_that_world() -> None:
    steps = [step(1, 9.0), step(1, 10.5), step(2, 10.2, world=3), step(1, 11.0), step(2, 12.0)]
    assert together(steps, {1, 2}, 2, since_s=10.0) == 12.0
    assert together(steps[:4], {1, 2}, 2, since_s=10.0) is None, "the other one only with the dead"
    assert together(steps, {1, 2, 3}, 2, since_s=10.0) is None


def test_the_result_counts_who_came_back_and_who_was_kept() -> None:
    blows = [
        Blow("killed", 0.2, 3.0, survivors_kept=True),
        Blow("killed", None, 130.0, survivors_kept=False),
        Blow("stopped", 60.0, 70.0, survivors_kept=True),
    ]
    killed, stopped = text(document(blows, {"workers": 3})).splitlines()
    assert "2 killed: survivors stepped again within 120 s in 1, median 0.200 s" in killed
    assert killed.endswith("survivors kept: 1")
    assert "1 stopped" in stopped
    assert (
        line_text(blows[1])
        == "killed: survivors step again after -, all after 130.000 s; a survivor ended"
    )
    assert text(document([], {"workers": 3})) == "nothing was asked for"


def test_a_group_in_which_nobody_could_survive_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "torchft", "--workers", "1"]) == 2
    assert "at least 2 workers" in capsys.readouterr().err


@pytest.mark.slow
def test_without_torchft_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torchft") is not None:
        pytest.skip("torchft is here")
    assert cli.main(["bench", "torchft", "--kills", "1"]) == 2
    assert "pip install --target DIR torchft" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_kill(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install torchft")
    output = tmp_path / "out.json"
    given = ("--workers", "2", "--kills", "1", "--stops", "0", "--output", str(output))
    assert cli.main(["bench", "torchft", *given]) == 0
    (blow,) = json.loads(output.read_text())["blows"]
    assert blow["what"] == "killed"
    assert blow["complete_s"] > 0
