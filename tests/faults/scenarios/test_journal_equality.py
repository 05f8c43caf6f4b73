"""One process fed the journal ends where the job ended, wherever workers were killed (float64)."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.daemon.executors.journal import Journal
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import Config, EnvSection, JobSection, PpoSection
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.trainer.reproduce import Report, read_lineage, reproduce
from tests.fakes.scripted_supervisor import ScriptedSupervisor
from tests.faults.injectors.exact import SMALL, Run, pauses, run, state_of

pytestmark = [pytest.mark.slow, pytest.mark.faults]

TOLERANCE = 1e-10
ITERATIONS = 40
SETTINGS = (
    *(*SMALL, "env.task=pointmass", "ppo.dtype=float64"),
    *("env.budget=per_rank", "env.num_envs=16"),
)
DURING = (
    *("rollout:1@4=kill", "backward_begin:1@8=kill", "backward_end:0@12=kill"),
    *("between_steps:1@16=kill", "last_collective:0@20=kill", "prepared:1@24=kill"),
    *("committed:0@28=kill", "gae:1@32=kill", "leave_generation:1=kill"),
)
"""In the rollout, in the backward pass, between optimiser steps, in the merge, right after the safe
point, and right after one at which somebody enters."""
REBUILD = (
    *("rollout:2@4=kill", "who_is_where:1@4=kill", "rollout:2@8=kill", "hash_compare:0@8=kill"),
    *("rollout:1@12=kill", "broadcast:0@12=kill"),
)
"""A second one while the group is rebuilt, with the newcomer's state under way or compared."""


def reproduced(journal: Path, checkpoints: Path) -> Report:
    state = state_of(checkpoints)
    iteration = int(state["counters/iteration"])
    lineage = read_lineage(journal.read_bytes().splitlines())
    return reproduce(lineage, (iteration, state, str(checkpoints)))


def assert_reproduced(report: Report, iterations: int) -> None:
    assert report.iterations == report.checkpoint_iteration == iterations
    assert report.difference is not None
    assert report.difference <= TOLERANCE


def generations(found: Run) -> list[tuple[str, bool]]:
    return [
        (line["cause"], line["restore"]) for line in found.journal if line["event"] == "generation"
    ]


def test_numeric_28_31_killed_in_every_part_of_an_iteration(tmp_path: Path) -> None:
    """With two or three workers: what the others have is reweighted, lost envs begin new episodes."""
    settings = (*SETTINGS, "job.min_workers=2")
    paused = pauses(*range(3, ITERATIONS, 4))
    found = run(tmp_path / "run", 3, ITERATIONS, settings, faults=",".join((*DURING, paused)))
    assert set(found.killed) == set(DURING)
    causes = generations(found)
    assert causes.count(("worker_lost", False)) >= len(DURING)
    assert ("join", False) in causes
    assert [c for c in causes if c[1]] == [("start", True)], "nothing was restored"
    sizes = {sum(r["env_steps"] for r in x["ranks"]) for x in found.journal if "ranks" in x}
    assert len(sizes) > 1, "some iterations were reweighted"
    report = reproduced(found.directory / "journal.jsonl", found.directory / "checkpoints")
    assert_reproduced(report, ITERATIONS)


def test_killed_while_the_group_is_rebuilt(tmp_path: Path) -> None:
    """Always three workers: it waits for the lost before it goes on."""
    settings = (*SETTINGS, "job.min_workers=3")
    found = run(tmp_path / "run", 3, 16, settings, faults=",".join(REBUILD))
    assert set(found.killed) == set(REBUILD)
    report = reproduced(found.directory / "journal.jsonl", found.directory / "checkpoints")
    assert_reproduced(report, 16)


def test_numeric_31_one_drains_and_one_joins(tmp_path: Path) -> None:
    config = Config(
        job=JobSection(iterations=ITERATIONS, max_workers=3),
        env=EnvSection(task="pointmass", num_envs=16),
        ppo=PpoSection(hidden=(16, 16), rollout_steps=8, epochs=2, mini_batches=2, dtype="float64"),
    )
    pace = ",".join(f"rollout:0@{i}=sleep=0.15" for i in range(1, ITERATIONS))
    with ScriptedSupervisor(tmp_path, config, failpoints=pace) as supervisor:
        a, b, c, d = (supervisor.start(slot) for slot in range(4))
        supervisor.wait_ready(a, b, c, d)
        plans = [supervisor.publish([a, b, c], restore=True, commit_first=True)]
        supervisor.wait_committed(5, a, b, c)
        plans.append(change(supervisor, [a, b]))
        supervisor.send(c, messages.Leave(reason="drained"))
        supervisor.processes[c].wait(60)
        assert [m.reason for m in supervisor.of(messages.Leaving, c)] == ["drained"]
        plans.append(change(supervisor, [a, b, d]))
        for key in (a, b, d):
            supervisor.processes[key].wait(60)
        journal = write_journal(tmp_path / "journal.jsonl", supervisor, plans)
    lineage = read_lineage(journal.read_bytes().splitlines())
    assert {len(line.ranks) for line in lineage.iterations} == {2, 3}
    assert_reproduced(reproduced(journal, tmp_path / "checkpoints"), ITERATIONS)


def change(supervisor: ScriptedSupervisor, members: Sequence[WorkerKey]) -> Plan:
    """A planned change, until its first iterations are committed."""
    survivors = [m for m in members if supervisor.plan and supervisor.plan.find(m)]
    plan = supervisor.publish(members, kind="planned", survivors=survivors)

    def committed() -> bool:
        reports = [c for c in supervisor.of(messages.Committed) if c.generation == plan.generation]
        return len(reports) >= 3 * len(members)

    supervisor.wait(committed, what=f"generation {plan.generation} to train")
    return plan


def write_journal(path: Path, supervisor: ScriptedSupervisor, plans: Sequence[Plan]) -> Path:
    """The journal that a real supervisor would have written of what the workers said."""
    journal = Journal(path)
    by_generation = {plan.generation: plan for plan in plans}
    for message in supervisor.log:
        if isinstance(message, messages.Formed):
            journal.generation(by_generation[message.generation], message, supervisor.config)
        elif isinstance(message, messages.Committed):
            assert journal.commit(message) in ("new", "duplicate")
    journal.close()
    return path
