"""The throughput benchmark: its arithmetic, and a real small run."""

import json
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench import report, throughput
from rallypoint.ops.bench.processes import BenchError
from rallypoint.ops.bench.throughput import WARM_UP, Round


def iteration(number: int, world_size: int = 2) -> dict[str, Any]:
    """A journal line: half a second and 50 env steps each."""
    return {
        "event": "iteration",
        "world_size": world_size,
        "env_steps_total": 50 * number,
        "unix_s": 1000.0 + 0.5 * number,
    }


def test_a_rate_leaves_the_warm_up_out() -> None:
    slow = {**iteration(1), "unix_s": 0.0}
    lines = [{"event": "generation"}, slow, *map(iteration, range(2, WARM_UP + 5))]
    assert throughput.rate_of_journal(lines, workers=2) == pytest.approx(100.0)


def test_a_disturbed_job_gives_no_rate() -> None:
    lines = [iteration(n, world_size=1 if n == WARM_UP + 2 else 2) for n in range(1, WARM_UP + 5)]
    with pytest.raises(BenchError, match="2 workers all the time"):
        throughput.rate_of_journal(lines, workers=2)
    with pytest.raises(BenchError, match="2 workers all the time"):
        throughput.rate_of_journal(lines[:WARM_UP], workers=2)


def test_ranks_side_by_side_add_up() -> None:
    ranks = [{"env_steps": 100, "seconds": 2.0}, {"env_steps": 100, "seconds": 4.0}]
    assert throughput.sum_of_rates(ranks) == 75.0


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [Round(1000.0, 500.0, 490.0), Round(400.0, 200.0, 200.0), Round(900.0, 450.0, 449.0)]
    about = {"task": "pointmass", "workers": 2, "num_envs": 256, "iterations": 20}
    document = report.throughput_document(rounds, about)
    assert document["elastic_over_plain"] == pytest.approx(449 / 450)
    assert document["training_over_env"] == pytest.approx(449 / 900)
    assert document["env_only"] == 900.0
    assert "0.998" in report.throughput_text(document)


def test_a_global_budget_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "throughput", "--set", "env.budget=global"]) == 2
    assert "per_rank" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_real_run_has_three_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "throughput.json"
    code = cli.main(
        [
            *("bench", "throughput", "--workers", "1", "--iterations", "2", "--rounds", "1"),
            *("--task", "pointmass", "--set", "env.num_envs=16", "--output", str(output)),
        ]
    )
    assert code == 0
    document = json.loads(output.read_text())
    assert document["num_envs"] == 16
    (one,) = document["rounds"]
    assert min(one.values()) > 0
    assert document["elastic_over_plain"] == pytest.approx(one["elastic"] / one["plain"])
    assert "elastic job / plain DDP" in capsys.readouterr().out
