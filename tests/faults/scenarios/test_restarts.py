"""A budget over restarts: what was asked for is trained, once."""

from pathlib import Path

import pytest

from tests.faults.injectors.exact import EXACT, run

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 48 * 8
"""Env steps of an iteration."""


def test_numeric_38_a_budget_is_reached_exactly_once_over_restarts(tmp_path: Path) -> None:
    """By iterations, then by env steps, with other numbers of workers and a loss; then nothing is left."""
    settings = (*EXACT, "env.task=pointmass")
    bounded = (*settings, f"job.env_steps={9 * STEPS - 100}")
    run(tmp_path / "run", 2, 3, settings)
    run(tmp_path / "run", 1, 5, settings)
    found = run(tmp_path / "run", 3, 100, bounded, faults="between_steps:1@7=kill")
    assert found.killed == ("between_steps:1@7=kill",)
    before = found.journal
    assert run(tmp_path / "run", 2, 100, bounded).journal == before, "a reached budget is the end"
    lines = [line for line in before if line["event"] == "iteration"]
    assert [line["iteration"] for line in lines] == list(range(1, 10))
    assert [sum(rank["env_steps"] for rank in line["ranks"]) for line in lines] == 9 * [STEPS]
    assert found.tensors()["counters/env_steps"].item() == 9 * STEPS
