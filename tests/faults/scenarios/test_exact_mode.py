"""Exact mode: whatever happens to workers, a run ends with the same bits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.injectors.exact import EXACT, Run, pauses, run

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@dataclass(frozen=True)
class Case:
    """A task, how long it is trained, and where workers are killed."""

    task: str
    iterations: int
    faults: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        return (*EXACT, f"env.task={self.task}", "ppo.dtype=float32")


POINTMASS = Case(
    "pointmass",
    40,
    (
        *("rollout:1@5=kill", "backward_end:1@11=kill", "prepared:1@17=kill"),
        *("committed:0@23=kill", "between_steps:1@29=kill", "last_collective:0@35=kill"),
    ),
)
QUADRUPED = Case(
    "quadruped-velocity", 12, ("rollout:0@4=kill", "between_steps:1@7=kill", "gae:1@10=kill")
)
CASES = pytest.mark.parametrize("case", [POINTMASS, QUADRUPED], ids=lambda case: case.task)

Constant = Callable[[Case], Run]


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Constant:
    """The run of one worker that nothing happens to, by case."""
    made: dict[str, Run] = {}
    base = tmp_path_factory.mktemp("constant")

    def get(case: Case) -> Run:
        if case.task not in made:
            made[case.task] = run(base / case.task, 1, case.iterations, case.settings)
        return made[case.task]

    return get


def assert_same_bits(found: Run, expected: Run, iterations: int) -> None:
    assert found.hashes == expected.hashes
    assert len(found.hashes) == iterations
    assert found.sha256 == expected.sha256
    names = {name.split("/")[0] for name in found.tensors()}
    assert names >= {"model", "optimiser", "normaliser", "counters"}


@pytest.mark.parametrize(
    ("case", "workers"),
    [(POINTMASS, 2), (POINTMASS, 3), (QUADRUPED, 2)],
    ids=lambda value: getattr(value, "task", value),
)
def test_numeric_05_31_any_number_of_workers(
    tmp_path: Path, constant: Constant, case: Case, workers: int
) -> None:
    found = run(tmp_path / "run", workers, case.iterations, case.settings)
    assert workers in found.world_sizes
    assert_same_bits(found, constant(case), case.iterations)


@CASES
def test_numeric_05_31_a_worker_is_killed_every_few_iterations(
    tmp_path: Path, constant: Constant, case: Case
) -> None:
    """Never below two, so that there is always a survivor and every point fires."""
    settings = (*case.settings, "job.min_workers=2")
    paused = pauses(*range(2, case.iterations, 6))
    faults = ",".join((*case.faults, paused))
    found = run(tmp_path / "run", 3, case.iterations, settings, faults=faults)
    assert found.killed == case.faults
    assert {2, 3} <= set(found.world_sizes)
    assert_same_bits(found, constant(case), case.iterations)
    lines = [line for line in found.journal if line["event"] == "iteration"]
    cut = [line["iteration"] for line in lines if any(rank["cut"] for rank in line["ranks"])]
    assert cut == [1], "no episode is cut but at the start"
    assert not [rank for line in lines for rank in line["ranks"] if rank["dropped"]]
    steps = {sum(rank["env_steps"] for rank in line["ranks"]) for line in lines}
    assert steps == {48 * 8}, "every iteration has the whole budget"


def test_without_the_backup_the_bits_depend_on_what_was_lost(
    tmp_path: Path, constant: Constant
) -> None:
    """Or the tests above would show nothing."""
    # All from the first iteration on: without the backup, a later entry would move the bits as well.
    settings = (*POINTMASS.settings, "env.backup=none", "job.min_workers=3")
    found = run(tmp_path / "run", 3, 12, settings, faults="rollout:1@5=kill")
    assert found.killed == ("rollout:1@5=kill",)
    expected = constant(POINTMASS).hashes
    assert found.hashes[:4] == expected[:4]
    assert found.hashes[4] != expected[4]


@pytest.mark.parametrize(
    ("case", "resumed"),
    [(POINTMASS, 1), (POINTMASS, 2), (QUADRUPED, 1)],
    ids=lambda value: getattr(value, "task", value),
)
def test_numeric_29_a_resume_with_env_rows_goes_on_with_the_same_bits(
    tmp_path: Path, constant: Constant, case: Case, resumed: int
) -> None:
    """Two workers, stopped after some iterations, then as many or another number."""
    settings = (*case.settings, "checkpoint.env_rows=true")
    half = case.iterations // 2
    first = run(tmp_path / "run", 2, half, settings)
    assert first.hashes == constant(case).hashes[:half]
    whole = run(tmp_path / "run", resumed, case.iterations, settings)
    assert_same_bits(whole, constant(case), case.iterations)


def test_numeric_29_without_env_rows_a_resume_begins_new_episodes(
    tmp_path: Path, constant: Constant
) -> None:
    run(tmp_path / "run", 1, 3, POINTMASS.settings)
    found = run(tmp_path / "run", 1, 5, POINTMASS.settings)
    assert found.hashes[:3] == constant(POINTMASS).hashes[:3]
    assert found.hashes[3] != constant(POINTMASS).hashes[3]
