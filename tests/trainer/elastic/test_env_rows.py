"""Env rows between processes: the files of the slots, and who continues which envs."""

import functools
import multiprocessing
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.daemon.shared.collectives import MOVES
from rallypoint.trainer.elastic import envrows
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.envrows import (
    EnvRows,
    SafePoint,
    load_rows_of_env,
    rows_of_env,
)
from rallypoint.trainer.elastic.rowsfile import RowsFiles
from rallypoint.trainer.elastic.rowsmove import exchange
from rallypoint.trainer.envs.base import Capabilities
from rallypoint.trainer.errors import EnvError
from rallypoint.trainer.rollout import join
from tests.fakes.collectives import LockStepGroup, LockStepRank
from tests.fakes.training import BLOCK, Worker, config, make_worker

LINEAGE = "uid/1"
FORK = multiprocessing.get_context("fork")
BOUND_S = 30.0


def at(iteration: int, lineage: str = LINEAGE) -> SafePoint:
    return SafePoint(lineage, iteration)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def rows(*values: float) -> dict[str, torch.Tensor]:
    return {"env/x": torch.tensor(values, dtype=torch.float64)[:, None]}


# --- files --------------------------------------------------------------------------------------


def test_rows_are_found_by_safe_point_and_env_in_the_files_of_all_slots(tmp_path: Path) -> None:
    first, second = RowsFiles(tmp_path, 0), RowsFiles(tmp_path, 1)
    first.save(LINEAGE, 4, ids(0, 1, 2), rows(0.0, 1.0, 2.0))
    second.save(LINEAGE, 4, ids(5, 6), rows(5.0, 6.0))
    second.save(LINEAGE, 5, ids(5, 6), rows(50.0, 60.0))
    found, values = second.find(LINEAGE, 4, ids(1, 2, 6, 9))
    assert found.tolist() == [1, 2, 6]
    assert values["env/x"].flatten().tolist() == [1.0, 2.0, 6.0]
    assert first.find(LINEAGE, 5, ids(6))[1]["env/x"].tolist() == [[60.0]]
    for lineage, iteration in (("uid/2", 4), (LINEAGE, 3), (LINEAGE, 6)):
        assert first.find(lineage, iteration, ids(0, 1, 5))[0].size == 0


def test_the_safe_point_before_stays_until_the_one_after_next(tmp_path: Path) -> None:
    files = RowsFiles(tmp_path, 0)
    for iteration in range(1, 5):
        files.save(LINEAGE, iteration, ids(iteration), rows(float(iteration)))
        assert files.find(LINEAGE, iteration, ids(iteration))[0].tolist() == [iteration]
        assert files.find(LINEAGE, iteration - 1, ids(iteration - 1))[0].size == (iteration > 1)
    assert files.find(LINEAGE, 2, ids(2))[0].size == 0


@pytest.mark.parametrize("damage", ["cut", "byte", "head"])
def test_a_file_that_is_not_whole_is_not_there(tmp_path: Path, damage: str) -> None:
    files = RowsFiles(tmp_path, 0)
    files.save(LINEAGE, 1, ids(0), rows(1.0))
    files.save(LINEAGE, 2, ids(0), rows(2.0))
    path = tmp_path / "0.rows.0"
    data = bytearray(path.read_bytes())
    if damage == "byte":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-3], "byte": data, "head": data[:20]}[damage])
    assert files.find(LINEAGE, 2, ids(0))[0].size == 0
    assert files.find(LINEAGE, 1, ids(0))[0].tolist() == [0]


@pytest.mark.faults
def test_a_writer_that_is_killed_while_it_writes_leaves_the_one_before(tmp_path: Path) -> None:
    files = RowsFiles(tmp_path, 0)
    for iteration in (1, 2):
        files.save(LINEAGE, iteration, ids(0), rows(float(iteration)))
    large = {"env/x": torch.zeros(1, 3 * 2**17, dtype=torch.float64)}
    half = large["env/x"].nbytes // 2

    def write_too_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends it in the middle of a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
        files.save(LINEAGE, 3, ids(0), large)

    child = FORK.Process(target=write_too_much)
    child.start()
    child.join(BOUND_S)
    assert child.exitcode == -signal.SIGXFSZ
    assert (tmp_path / "0.rows.1").stat().st_size == half
    assert files.find(LINEAGE, 3, ids(0))[0].size == 0
    assert files.find(LINEAGE, 2, ids(0))[0].tolist() == [0]


# --- envs ---------------------------------------------------------------------------------------


def held(worker: Worker, backup: RowsFiles | None) -> EnvRows:
    """The rows of a worker that owns no envs yet."""
    worker.registry.register_rows(
        "env",
        functools.partial(rows_of_env, worker.env),
        functools.partial(load_rows_of_env, worker.env),
    )
    return EnvRows(worker.env, worker.registry, worker.learner.on_assign, BLOCK, backup)


def begin(directory: Path | None, slot: int = 0, task: str = "pointmass") -> tuple[Worker, EnvRows]:
    worker = make_worker(config(task=task, dtype="float32"), ())
    return worker, held(worker, None if directory is None else RowsFiles(directory, slot))


def run(worker: Worker, envs: EnvRows, blocks: tuple[int, ...], iterations: range) -> list[Tensor]:
    """Collect with these blocks; the rewards of each iteration, and the episodes that ended."""
    found = []
    for iteration in iterations:
        envs.hold(blocks, at(iteration - 1))
        rollout = worker.collect(iteration)
        envs.stand(at(iteration))
        found += [rollout.rewards, rollout.episode_returns]
    return found


def test_rows_go_on_only_from_the_safe_point_before() -> None:
    worker, envs = begin(None)
    assert envs.hold((0, 1), at(0)) == (0, 1)
    assert envs.hold((0, 1), at(0)) == (0, 1), (
        "a rollout had begun: its rows are past the safe point"
    )
    worker.collect(1)
    envs.stand(at(1))
    assert envs.owns((0, 1), at(1))
    assert envs.hold((0, 1, 3), at(1)) == (3,)
    worker.collect(2)
    envs.stand(at(2))
    assert not envs.owns((0, 1, 3), at(3))
    assert envs.hold((0, 1), at(2)) == ()
    envs.stand(at(3))
    assert envs.hold((0,), at(3, "uid/9")) == (0,), "another lineage"
    envs.stand(at(4))
    envs.forget()
    assert envs.hold((0,), at(4)) == (0,)


@pytest.mark.parametrize(
    "task", ["pointmass", pytest.param("quadruped-velocity", marks=pytest.mark.slow), "cartpole"]
)
def test_another_process_collects_the_same_rollout_again(tmp_path: Path, task: str) -> None:
    """Bit for bit, running episode sums included; the one that is lost was past it already."""
    worker, envs = begin(tmp_path, 0, task)
    first = run(worker, envs, (0, 2), range(1, 5))
    envs.hold((0, 2), at(4))
    heir, its_envs = begin(tmp_path, 1, task)
    assert its_envs.hold((0, 2), at(4)) == ()
    again = [heir.collect(5), worker.collect(5)]
    for name in ("rewards", "actor_obs", "episode_returns", "episode_lengths", "terminated"):
        assert torch.equal(getattr(again[0], name), getattr(again[1], name)), name
    assert len(first) == 8


def test_blocks_of_the_lost_are_collected_beside_a_rollout_in_hand(tmp_path: Path) -> None:
    whole, all_envs = begin(tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    (tmp_path / "shared").mkdir()
    run(whole, all_envs, (0, 1, 2), range(1, 3))
    all_envs.hold((0, 1, 2), at(2))
    expected = whole.collect(3)
    survivor, envs = begin(tmp_path / "shared", 0)
    lost, its_envs = begin(tmp_path / "shared", 1)
    run(survivor, envs, (0, 2), range(1, 3))
    run(lost, its_envs, (1,), range(1, 3))
    envs.hold((0, 2), at(2))
    in_hand = survivor.collect(3)
    envs.stand(at(3))
    kept = envs.set_aside()
    assert envs.hold((1,), at(2)) == ()
    joined = join(in_hand, survivor.collect(3))
    envs.bring_back(kept, at(3))
    envs.stand(at(3))
    assert joined.blocks == (0, 1, 2)
    for name in ("rewards", "actor_obs", "values", "log_prob", "last_values"):
        assert torch.equal(getattr(joined, name), getattr(expected, name)), name
    assert joined.episode_returns.sum() == pytest.approx(expected.episode_returns.sum().item())
    assert sorted(joined.episode_rows.tolist()) == sorted(expected.episode_rows.tolist())
    assert envs.hold((0, 1, 2), at(3)) == ()
    all_envs.stand(at(3))
    assert all_envs.hold((0, 1, 2), at(3)) == ()
    assert torch.equal(survivor.collect(4).rewards, whole.collect(4).rewards)


def test_an_env_that_cannot_carry_state_is_refused_in_words(tmp_path: Path) -> None:
    worker = make_worker(config(), ())
    capabilities = Capabilities(
        "rebuild", carry_state=False, final_obs=False, deterministic_split=False
    )
    worker.env._spec = replace(worker.env.spec, capabilities=capabilities)  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=r'env\.backup = "node" needs an env whose rows'):
        held(worker, RowsFiles(tmp_path, 0))


# --- several nodes ------------------------------------------------------------------------------


def test_rows_come_from_whatever_node_has_them(tmp_path: Path) -> None:
    """Two slots of one node and one of another; block 1 goes to the other node, block 3 back, block 4
    is nowhere, and block 0 stays."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    nodes = [RowsFiles(tmp_path / node, slot) for node, slot in (("a", 0), ("a", 1), ("b", 0))]

    def save(files: RowsFiles, iteration: int, *blocks: int) -> None:
        env_ids = envrows.env_ids(blocks, BLOCK)
        files.save(LINEAGE, iteration, env_ids, rows(*(100.0 * iteration + env_ids)))

    save(nodes[0], 6, 0)
    save(nodes[1], 6, 1, 2)
    save(nodes[2], 6, 3)
    save(nodes[2], 5, 4)
    wanted = ((0, 3), (2,), (1, 4))

    def move(rank: LockStepRank) -> None:
        files = nodes[rank.rank]
        exchange(rank, files, LINEAGE, 6, wanted[rank.rank], files.receive, blocks=5, size=BLOCK)

    group = LockStepGroup(3)
    group.run(move)
    for files, blocks in zip(nodes, wanted, strict=True):
        env_ids = envrows.env_ids(tuple(b for b in blocks if b != 4), BLOCK)
        found, values = files.find(LINEAGE, 6, envrows.env_ids(blocks, BLOCK))
        assert sorted(found.tolist()) == env_ids.tolist()
        assert values["env/x"].flatten().tolist() == (600.0 + found).tolist()
    assert [rank.log for rank in group.ranks] == [group.ranks[0].log] * 3
    assert {name for name, _, _ in group.ranks[0].log} == {entry.name for entry in MOVES}
    assert nodes[0].find(LINEAGE, 6, envrows.env_ids((1,), BLOCK))[0].size == BLOCK, "still there"


def test_rows_of_all_envs_are_gathered_beside_those_that_were_received(tmp_path: Path) -> None:
    """At one safe point: first the new owner gets its block, then rank 0's node gets all for a checkpoint."""
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
    nodes = [RowsFiles(tmp_path / node, 0) for node in ("a", "b")]
    for files, block in zip(nodes, (0, 1), strict=True):
        env_ids = envrows.env_ids((block, block + 2), BLOCK)
        files.save(LINEAGE, 6, env_ids, rows(*(600.0 + env_ids)))

    def move(rank: LockStepRank) -> None:
        files = nodes[rank.rank]
        received, gathered = ((1,), ()), (range(4), ())
        for wanted, keep in ((received, files.receive), (gathered, files.gather)):
            exchange(rank, files, LINEAGE, 6, wanted[rank.rank], keep, blocks=4, size=BLOCK)

    LockStepGroup(2).run(move)
    every = np.arange(4 * BLOCK)
    found, values = nodes[0].find(LINEAGE, 6, every)
    assert sorted(found.tolist()) == every.tolist()
    assert values["env/x"].flatten().tolist() == (600.0 + found).tolist()
    assert len(nodes[1].find(LINEAGE, 6, every)[0]) == 2 * BLOCK, "sent to nobody else"


def test_nothing_to_move_moves_nothing(tmp_path: Path) -> None:
    files = RowsFiles(tmp_path, 0)
    exchange(SingleProcess(), files, LINEAGE, 1, (0, 1), files.receive, blocks=2, size=BLOCK)
    assert not list(tmp_path.iterdir())
