"""4 → 2 → 4 with real workers: what is the same before and after a switch, and, in exact mode, at the
end of the whole run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import (
    Config,
    EnvSection,
    JobSection,
    PpoSection,
)
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from tests.fakes.scripted_supervisor import ScriptedSupervisor
from tests.faults.injectors.exact import sha256, state_of

pytestmark = [pytest.mark.slow, pytest.mark.faults]

T = 8
PPO = PpoSection(hidden=(16, 16), rollout_steps=T, epochs=2, mini_batches=2)


def exact(task: str, iterations: int) -> Config:
    return Config(
        job=JobSection(iterations=iterations, max_workers=4),
        env=EnvSection(task=task, budget="global", num_envs=48, backup="node"),
        ppo=PpoSection(
            hidden=(16, 16), rollout_steps=T, epochs=2, mini_batches=2, reduction="ordered"
        ),
    )


def switch(
    supervisor: ScriptedSupervisor, members: Sequence[WorkerKey], survivors: Sequence[WorkerKey]
) -> Plan:
    """Publish a planned change, and wait until it has committed two iterations."""
    plan = supervisor.publish(members, kind="planned", survivors=survivors)
    supervisor.wait(lambda: len(commits_of(supervisor, plan)) >= 2, what="two iterations more")
    return plan


def commits_of(supervisor: ScriptedSupervisor, plan: Plan) -> dict[int, messages.Committed]:
    """Iterations of a generation that all of its members have committed."""
    members = {m.key for m in plan.members}
    by: dict[int, dict[WorkerKey, messages.Committed]] = {}
    for commit in supervisor.of(messages.Committed):
        if commit.generation == plan.generation:
            by.setdefault(commit.iteration, {})[commit.key] = commit
    return {k: next(iter(c.values())) for k, c in sorted(by.items()) if c.keys() == members}


def four_two_four(supervisor: ScriptedSupervisor) -> list[Plan]:
    """On what the workers take for two nodes."""
    keys = [supervisor.start(slot, node="nm"[slot // 2]) for slot in range(4)]
    supervisor.wait_ready(*keys)
    first = supervisor.publish(keys, restore=True, commit_first=True)
    supervisor.wait(lambda: len(commits_of(supervisor, first)) >= 3, what="three iterations")
    second = switch(supervisor, keys[:2], keys[:2])
    return [first, second, switch(supervisor, keys, keys[:2])]


def test_numeric_30_31_a_switch_changes_no_state_and_counts_what_was_used(tmp_path: Path) -> None:
    config = Config(env=EnvSection(task="pointmass", num_envs=16), ppo=PPO)
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        plans = four_two_four(supervisor)
        assert [plan.generation for plan in plans] == [1, 2, 3]
        total = 0
        for plan, world_size in zip(plans, (4, 2, 4), strict=True):
            formed = [f for f in supervisor.of(messages.Formed) if f.generation == plan.generation]
            assert len({f.state_hash for f in formed}) == 1
            before = [c for c in commits(supervisor) if c.generation < plan.generation]
            if (
                before
            ):  # parameters, moments, steps, learning rate, statistics: one hash of them all
                assert formed[0].state_hash == before[-1].state_hash
                assert formed[0].iteration == before[-1].iteration
            for commit in commits_of(supervisor, plan).values():
                total += world_size * 16 * T
                assert commit.env_steps_total == total
                assert [rank.env_steps for rank in commit.ranks] == world_size * [16 * T]


def commits(supervisor: ScriptedSupervisor) -> list[messages.Committed]:
    """One report of each iteration, in order."""
    by = {c.iteration: c for c in supervisor.of(messages.Committed)}
    return [by[k] for k in sorted(by)]


PACE = ",".join(f"rollout:0@{i}=sleep=0.15" for i in range(1, 40))
"""So that the test is faster than the workers."""


@pytest.mark.parametrize(("task", "iterations"), [("pointmass", 40), ("quadruped-velocity", 24)])
def test_numeric_31_the_sequence_ends_with_the_bits_of_one_worker(
    tmp_path: Path, task: str, iterations: int
) -> None:
    config = exact(task, iterations)
    with ScriptedSupervisor(tmp_path / "one", config) as supervisor:
        key = supervisor.start(0)
        supervisor.wait_ready(key)
        supervisor.publish([key], restore=True, commit_first=True)
        supervisor.wait_committed(iterations, key)
        supervisor.processes[key].wait(60)
        constant = commits(supervisor)
    with ScriptedSupervisor(tmp_path / "many", config, failpoints=PACE) as supervisor:
        plans = four_two_four(supervisor)
        keys = [m.key for m in plans[-1].members]
        supervisor.wait_committed(iterations, *keys)
        for key in keys:
            supervisor.processes[key].wait(60)
        changing = commits(supervisor)
    assert {len(c.ranks) for c in changing} == {2, 4}
    assert [c.state_hash for c in changing] == [c.state_hash for c in constant]
    assert [c.iteration for c in changing] == list(range(1, iterations + 1))
    many, one = (state_of(tmp_path / name / "checkpoints") for name in ("many", "one"))
    assert sha256(many) == sha256(one)
    assert not [rank for c in changing[1:] for rank in c.ranks if rank.cut]
