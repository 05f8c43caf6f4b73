"""Real worker processes under a supervisor that does what the test says."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import (
    CheckpointSection,
    Config,
    EnvSection,
    JobSection,
    MembershipSection,
    PpoSection,
)
from rallypoint.daemon.shared.plan import WorkerKey
from tests.fakes.scripted_supervisor import ScriptedSupervisor

pytestmark = [pytest.mark.slow, pytest.mark.faults]

T = 8


def make_config(**env: object) -> Config:
    return Config(
        env=EnvSection(task="pointmass", **{"num_envs": 16, **env}),  # type: ignore[arg-type]
        ppo=PpoSection(hidden=(16, 16), rollout_steps=T, epochs=2),
        checkpoint=CheckpointSection(every_iterations=20),
        membership=MembershipSection(orphan_grace_s=1.0),
    )


def begin(supervisor: ScriptedSupervisor, count: int) -> list[WorkerKey]:
    keys = [supervisor.start(slot) for slot in range(count)]
    supervisor.wait_ready(*keys)
    supervisor.publish(keys, restore=True, commit_first=True)
    supervisor.wait_committed(3, *keys)
    return keys


def committed(supervisor: ScriptedSupervisor, key: WorkerKey) -> list[messages.Committed]:
    return supervisor.of(messages.Committed, key)


def assert_strict(commits: Sequence[messages.Committed]) -> None:
    numbers = [c.iteration for c in commits]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "no iteration repeats or is skipped"


def assert_agree(supervisor: ScriptedSupervisor) -> None:
    """Every worker that committed an iteration committed the same state from the same rollouts, and says
    the same figures of it: none is the view of one rank."""
    seen: dict[int, tuple[object, ...]] = {}
    for commit in supervisor.of(messages.Committed):
        value = (commit.state_hash, commit.ranks, commit.env_steps_total, commit.metrics)
        assert seen.setdefault(commit.iteration, value) == value
    totals = [seen[k] for k in sorted(seen)]
    assert totals


def kill_and_rebuild(
    supervisor: ScriptedSupervisor, victim: WorkerKey, rest: Sequence[WorkerKey]
) -> int:
    """SIGKILL one, publish the others; the iteration that was newest before."""
    supervisor.kill(victim)
    supervisor.wait(lambda: bool(supervisor.of(messages.Broken)), what="survivors to notice")
    before = max(c.iteration for c in supervisor.of(messages.Committed))
    plan = supervisor.publish(rest, survivors=rest)
    supervisor.wait(
        lambda: (
            len([s for s in supervisor.of(messages.Stepped) if s.generation == plan.generation])
            == len(rest)
        ),
        what="survivors to step again",
    )
    return before


def test_survivors_go_on_in_place_and_a_newcomer_joins_at_a_safe_point(tmp_path: Path) -> None:
    config = replace(make_config(), checkpoint=CheckpointSection(every_iterations=1))
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        a, b, c = begin(supervisor, 3)
        before = kill_and_rebuild(supervisor, b, [a, c])
        late = supervisor.start(1, incarnation=2)
        supervisor.wait_ready(late)
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.publish([a, c, late], kind="planned", survivors=[a, c])
        supervisor.wait_committed(newest + 10, a, c, late)
        for key in (a, c):
            assert_strict(committed(supervisor, key))
            assert supervisor.processes[key].poll() is None
            assert supervisor.counters(key.slot).env_builds == 1
        assert_agree(supervisor)
        first = committed(supervisor, late)[0]
        assert first.iteration > before
        assert [r.key for r in first.ranks] == [a, c, late]
        assert all(f.source != late for f in supervisor.of(messages.Formed))
        # The lost worker's blocks lapse; the newcomer takes the lowest free ones.
        assert first.ranks[2].blocks == (2, 3)
        assert not supervisor.of(messages.StepsLost)
        # Also of the one that is due at the very safe point at which the generation is left.
        assert {d.generation for d in supervisor.of(messages.CheckpointDone)} == {1, 2, 3}


def test_rank_0_holds_a_result_that_others_have_committed_so_the_source_is_not_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARRIER_FAILS_AT", "6")
    script = str(Path(__file__).parents[2] / "fakes" / "barrier_worker.py")
    with ScriptedSupervisor(tmp_path, make_config(), worker=script) as supervisor:
        a, b, c = begin(supervisor, 3)
        supervisor.wait(lambda: bool(supervisor.of(messages.Broken, a)), what="the barrier to fail")
        supervisor.wait_committed(6, b, c)
        assert committed(supervisor, a)[-1].iteration == 5
        plan = supervisor.publish([a, b, c], survivors=[a, b, c])
        supervisor.wait_committed(10, a, b, c)
        formed = [f for f in supervisor.of(messages.Formed) if f.generation == plan.generation]
        assert {(f.source, f.iteration) for f in formed} == {(b, 6)}
        assert [x.how for x in committed(supervisor, a) if x.iteration == 6] == ["held"]
        for key in (a, b, c):
            assert_strict(committed(supervisor, key))
        assert_agree(supervisor)


def test_rank_0_is_lost_as_it_leaves_the_barrier(tmp_path: Path) -> None:
    """Its part of the iteration counts, and another rank takes its place."""
    failpoints = "committed:0@6=kill"
    with ScriptedSupervisor(tmp_path, make_config(), failpoints=failpoints) as supervisor:
        a, b, c = begin(supervisor, 3)
        supervisor.wait(lambda: bool(supervisor.of(messages.Broken)), what="rank 0 to die")
        assert "committed:0@6=kill" in supervisor.failpoint_log.read_text()
        supervisor.publish([b, c], survivors=[b, c])
        supervisor.wait_committed(12, b, c)
        for key in (b, c):
            assert_strict(committed(supervisor, key))
        assert_agree(supervisor)
        sixth = next(x for x in committed(supervisor, b) if x.iteration == 6)
        assert a in [r.key for r in sixth.ranks], "the dead rank's part of iteration 6 counts"
        assert sixth.env_steps_total == 6 * 3 * 16 * T


def test_a_silent_peer_is_released_by_the_supervisor(tmp_path: Path) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b, c = begin(supervisor, 3)
        os.kill(supervisor.processes[c].pid, signal.SIGSTOP)
        try:
            plan = supervisor.publish([a, b], survivors=[a, b])
            supervisor.wait(
                lambda: (
                    len(
                        [
                            s
                            for s in supervisor.of(messages.Stepped)
                            if s.generation == plan.generation
                        ]
                    )
                    == 2
                ),
                what="survivors of a stopped peer to step again",
            )
        finally:
            os.kill(supervisor.processes[c].pid, signal.SIGCONT)
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.wait_committed(newest + 5, a, b)
        # The one that was left out comes back as a newcomer, whatever it once knew.
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.publish([a, b, c], kind="planned", survivors=[a, b])
        supervisor.wait_committed(newest + 8, a, b, c)
        assert_strict(committed(supervisor, a))
        assert_agree(supervisor)


def test_numeric_34_neither_stale_nor_fresh_state_at_rank_0_overwrites_survivors(
    tmp_path: Path,
) -> None:
    """Rank 0 was stopped for some iterations and knows old parameters, rank 1 has only initial ones."""
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b, stale = begin(supervisor, 3)
        os.kill(supervisor.processes[stale].pid, signal.SIGSTOP)
        try:
            supervisor.publish([a, b], survivors=[a, b])
            newest = max(x.iteration for x in supervisor.of(messages.Committed))
            supervisor.wait_committed(newest + 5, a, b)
        finally:
            os.kill(supervisor.processes[stale].pid, signal.SIGCONT)
        known = committed(supervisor, stale)[-1].iteration
        fresh = supervisor.start(3)
        supervisor.wait_ready(fresh)
        plan = supervisor.publish([stale, fresh, a, b], kind="planned", survivors=[a, b])
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.wait_committed(newest + 5, stale, fresh, a, b)
        formed = [f for f in supervisor.of(messages.Formed) if f.generation == plan.generation]
        last = [c for c in committed(supervisor, a) if c.generation < plan.generation][-1]
        assert known < last.iteration
        assert {f.source for f in formed} <= {a, b}
        assert {(f.iteration, f.state_hash) for f in formed} == {(last.iteration, last.state_hash)}
        for key in (a, b):
            assert_strict(committed(supervisor, key))
        assert_agree(supervisor)


def test_numeric_17_a_flipped_bit_is_found_and_the_iteration_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRUPT_AT", "6")
    script = str(Path(__file__).parents[2] / "fakes" / "corrupting_worker.py")
    with ScriptedSupervisor(tmp_path, make_config(), worker=script) as supervisor:
        keys = begin(supervisor, 3)
        supervisor.wait(lambda: bool(supervisor.of(messages.HashMismatch)), what="the mismatch")
        mismatch = supervisor.of(messages.HashMismatch)[0]
        assert len(set(mismatch.hashes)) == 2
        assert mismatch.iteration == 5, "iteration 6, in which it happened, was not committed"
        supervisor.wait(lambda: bool(supervisor.of(messages.Broken)), what="the iteration to end")
        supervisor.publish(keys, survivors=keys)
        supervisor.wait_committed(10, *keys)
        assert all(f.rolled_back is False for f in supervisor.of(messages.Formed))
        for key in keys:
            assert_strict(committed(supervisor, key))
        assert_agree(supervisor)


def test_global_budget_is_rebalanced_by_whole_blocks(tmp_path: Path) -> None:
    config = make_config(budget="global", num_envs=40)
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        a, b, c = begin(supervisor, 3)
        first = committed(supervisor, a)[0]
        assert sorted(len(r.blocks) for r in first.ranks) == [1, 2, 2]
        kill_and_rebuild(supervisor, a, [b, c])
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.wait_committed(newest + 5, b, c)
        last = committed(supervisor, b)[-1]
        assert sorted(block for r in last.ranks for block in r.blocks) == [0, 1, 2, 3, 4]
        late = supervisor.start(0, incarnation=2)
        supervisor.wait_ready(late)
        newest = max(x.iteration for x in supervisor.of(messages.Committed))
        supervisor.publish([b, c, late], kind="planned", survivors=[b, c])
        supervisor.wait_committed(newest + 8, b, c, late)
        assert [len(r.blocks) for r in committed(supervisor, late)[-1].ranks] == [2, 2, 1]
        assert_agree(supervisor)


def test_a_holding_generation_commits_once_waits_and_goes_on(tmp_path: Path) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b = begin(supervisor, 2)
        supervisor.kill(b)
        supervisor.wait(lambda: bool(supervisor.of(messages.Broken)), what="the survivor to notice")
        held_at = committed(supervisor, a)[-1].iteration
        hold = supervisor.publish([a], survivors=[a], hold=True)
        supervisor.wait(
            lambda: any(
                d.generation == hold.generation for d in supervisor.of(messages.CheckpointDone, a)
            ),
            what="the holding generation's checkpoint",
        )
        assert committed(supervisor, a)[-1].iteration == held_at
        late = supervisor.start(1, incarnation=2)
        supervisor.wait_ready(late)
        supervisor.publish([a, late], kind="planned", survivors=[a])
        supervisor.wait_committed(held_at + 5, a, late)
        assert_strict(committed(supervisor, a))
        assert_agree(supervisor)


def test_no_iteration_ends_and_no_checkpoint_commits_before_the_formed_mark(tmp_path: Path) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        supervisor.mark_formed_by_itself = False
        keys = [supervisor.start(slot) for slot in range(2)]
        supervisor.wait_ready(*keys)
        supervisor.publish(keys, restore=True)
        supervisor.wait(lambda: len(supervisor.of(messages.Stepped)) == 2, what="the first steps")
        for key in keys:
            supervisor.poll_page(key.slot, lambda page: page.phase == "wait_formed")
        assert not supervisor.of(messages.Committed)
        supervisor.mark_formed(1)
        supervisor.wait_committed(2, *keys)


def test_a_refused_commit_leaves_nothing_and_training_goes_on(tmp_path: Path) -> None:
    config = replace(make_config(), checkpoint=CheckpointSection(every_iterations=5))
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        supervisor.allow_commit = False
        keys = [supervisor.start(slot) for slot in range(2)]
        supervisor.wait_ready(*keys)
        supervisor.publish(keys, restore=True)
        supervisor.wait_committed(12, *keys)
        failures = supervisor.of(messages.CheckpointFailed)
        assert failures
        assert "told by the test" in failures[0].error
        assert CheckpointStore(str(tmp_path / "checkpoints")).list() == []


def test_a_stop_is_agreed_by_those_who_train_also_while_a_newcomer_is_about_to_enter(
    tmp_path: Path,
) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b = begin(supervisor, 2)
        late = supervisor.start(2)
        supervisor.wait_ready(late)
        supervisor.send(b, messages.StopAfterIteration(reason="stopped"))
        supervisor.publish([a, b, late], kind="planned", survivors=[a, b])
        supervisor.wait(lambda: len(supervisor.of(messages.Leaving)) == 2, what="both to leave")
        assert {(m.key, m.reason) for m in supervisor.of(messages.Leaving)} == {
            (a, "stopped"),
            (b, "stopped"),
        }


def test_a_stop_that_only_one_member_of_a_holding_generation_hears_waits_for_nobody(
    tmp_path: Path,
) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b = begin(supervisor, 2)
        hold = supervisor.publish([a, b], survivors=[a, b], hold=True)
        supervisor.wait(
            lambda: any(
                d.generation == hold.generation for d in supervisor.of(messages.CheckpointDone)
            ),
            what="the holding generation's checkpoint",
        )
        supervisor.send(b, messages.StopAfterIteration(reason="stopped"))
        supervisor.wait(lambda: bool(supervisor.of(messages.Leaving)), what="one to leave")
        assert [(m.key, m.reason) for m in supervisor.of(messages.Leaving)] == [(b, "stopped")]


def test_numeric_37_stop_is_agreed_checkpointed_and_clean(tmp_path: Path) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        a, b = begin(supervisor, 2)
        supervisor.send(b, messages.StopAfterIteration(reason="stopped"))  # one is enough
        supervisor.wait(lambda: len(supervisor.of(messages.Leaving)) == 2, what="both to leave")
        leaving = supervisor.of(messages.Leaving)
        assert {m.reason for m in leaving} == {"stopped"}
        assert len({m.iteration for m in leaving}) == 1
        assert [supervisor.processes[k].wait(20) for k in (a, b)] == [0, 0]
        newest = CheckpointStore(str(tmp_path / "checkpoints")).list()[0]
        assert newest.iteration == leaving[0].iteration


def test_numeric_29_38_finish_at_an_absolute_iteration_and_resume_at_another_world_size(
    tmp_path: Path,
) -> None:
    config = replace(make_config(), job=JobSection(iterations=12))
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        keys = begin(supervisor, 2)
        supervisor.wait(lambda: len(supervisor.of(messages.Leaving)) == 2, what="both to finish")
        assert {(m.reason, m.iteration) for m in supervisor.of(messages.Leaving)} == {
            ("finished", 12)
        }
        assert_agree(supervisor)
        last = committed(supervisor, keys[0])[-1]
    config = replace(make_config(), job=JobSection(iterations=15))
    with ScriptedSupervisor(tmp_path, config) as supervisor:
        keys = [supervisor.start(slot, incarnation=2) for slot in range(3)]
        supervisor.wait_ready(*keys)
        assert {m.checkpoint for m in supervisor.of(messages.Ready)} == {(1, 12)}
        supervisor.formed = 1
        supervisor.plan = None
        plan = supervisor.publish(keys, restore=True, commit_first=True)
        supervisor.wait(lambda: len(supervisor.of(messages.Leaving)) == 3, what="all to finish")
        assert [x.iteration for x in committed(supervisor, keys[0])] == [13, 14, 15]
        first = supervisor.of(messages.Formed)[0]
        assert (first.iteration, first.state_hash) == (12, last.state_hash)
        assert plan.restore


def test_an_orphan_leaves_after_the_grace(tmp_path: Path) -> None:
    with ScriptedSupervisor(tmp_path, make_config()) as supervisor:
        keys = begin(supervisor, 2)
        supervisor.vanish()
        assert [supervisor.processes[k].wait(30) for k in keys] == [0, 0]
