"""Which worker starts again for a larger simulator, and when."""

from pathlib import Path

import pytest

from rallypoint.daemon.shared.config import EnvSection
from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey
from rallypoint.trainer.errors import RestartCold
from rallypoint.trainer.regrow import Regrow, noted, outgrown

A, B, C = (WorkerKey("n", slot, 1) for slot in range(3))
ENV = EnvSection(budget="global", num_envs=48)


def plan(*capacities: int, blocks: int, generation: int = 5) -> Plan:
    """A generation of workers that can hold so many envs (0: it did not say), with ``blocks`` in all."""
    keys = (A, B, C)[: len(capacities)]
    return Plan(
        generation=generation,
        kind="forced",
        cause="worker_lost",
        formed=4,
        restore=False,
        hold=False,
        commit_first=False,
        budget_envs=48,
        members=tuple(
            PlannedWorker(key, rank, "h", 1, tuple(range(rank, blocks, len(keys))), capacity)
            for rank, (key, capacity) in enumerate(zip(keys, capacities, strict=True))
        ),
        survivors=keys,
    )


def test_those_that_are_too_small_for_their_share_take_turns() -> None:
    short = plan(16, 16, blocks=4)
    for iteration in range(4):
        turns = [outgrown(short, key, ENV, iteration) for key in (A, B)]
        assert sorted(turns, key=str) == [24, None], "never two at one safe point"
        assert turns[iteration % 2] == 24
    assert outgrown(plan(16, 24, blocks=5), A, ENV, 7) == 24
    assert outgrown(plan(16, 24, blocks=5), B, ENV, 7) is None
    assert outgrown(plan(16, 0, blocks=5), A, ENV, 7) == 24


def test_nobody_does_without_a_deficit_or_somebody_who_keeps_the_state() -> None:
    assert outgrown(plan(24, 24, blocks=6), B, ENV, 1) is None
    assert outgrown(plan(16, blocks=2), A, ENV, 1) is None
    assert outgrown(plan(16, 16, blocks=4), B, EnvSection(num_envs=48), 1) is None
    bounded = EnvSection(budget="global", num_envs=48, max_envs=16)
    assert outgrown(plan(16, 16, blocks=4), B, bounded, 1) is None


def test_it_waits_for_whoever_may_come_back(tmp_path: Path) -> None:
    note = tmp_path / "1.envs"
    patient = Regrow(B, ENV, note, asked=16, boot_s=1e6)
    patient.at_safe_point(plan(16, 16, blocks=4), 1)
    assert noted(note) == 0
    due = Regrow(B, ENV, note, asked=16, boot_s=0.0)
    with pytest.raises(RestartCold, match="built for 16 envs, its share has grown to 24"):
        due.at_safe_point(plan(16, 16, blocks=4), 1)
    assert noted(note) == 24


def test_one_that_tried_in_vain_does_not_again_and_lets_the_others_pass(tmp_path: Path) -> None:
    short = plan(16, 16, blocks=4)
    tried = Regrow(B, ENV, tmp_path / "1.envs", asked=24, boot_s=0.0)
    other = Regrow(A, ENV, tmp_path / "0.envs", asked=16, boot_s=0.0)
    for iteration in (1, 3):
        tried.at_safe_point(short, iteration)
        other.at_safe_point(short, iteration)  # not its turn
    tried.at_safe_point(short, 4)
    with pytest.raises(RestartCold):
        other.at_safe_point(short, 4)
