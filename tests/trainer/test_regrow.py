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


def test_the_last_rank_that_is_too_small_for_its_share_starts_again() -> None:
    short = plan(16, 16, blocks=4)
    assert outgrown(short, B, ENV) == 24
    assert outgrown(short, A, ENV) is None
    assert outgrown(plan(16, 24, blocks=5), A, ENV) == 24
    assert outgrown(plan(16, 0, blocks=5), A, ENV) == 24


def test_nobody_does_without_a_deficit_or_somebody_who_keeps_the_state() -> None:
    assert outgrown(plan(24, 24, blocks=6), B, ENV) is None
    assert outgrown(plan(16, blocks=2), A, ENV) is None
    assert outgrown(plan(16, 16, blocks=4), B, EnvSection(num_envs=48)) is None
    bounded = EnvSection(budget="global", num_envs=48, max_envs=16)
    assert outgrown(plan(16, 16, blocks=4), B, bounded) is None


def test_it_waits_for_whoever_may_come_back(tmp_path: Path) -> None:
    note = tmp_path / "1.envs"
    patient = Regrow(B, ENV, note, asked=16, boot_s=1e6)
    patient.at_safe_point(plan(16, 16, blocks=4))
    assert noted(note) == 0
    due = Regrow(B, ENV, note, asked=16, boot_s=0.0)
    with pytest.raises(RestartCold, match="built for 16 envs, its share has grown to 24"):
        due.at_safe_point(plan(16, 16, blocks=4))
    assert noted(note) == 24


def test_one_that_was_asked_for_that_many_and_could_not_does_not_try_again(tmp_path: Path) -> None:
    tried = Regrow(B, ENV, tmp_path / "1.envs", asked=24, boot_s=0.0)
    tried.at_safe_point(plan(16, 16, blocks=4))
