"""Levels of a terrain are a curriculum of the job: simulations that are built anew, and newcomers, go on with
them. The rules on a stub of Isaac Lab, then the real simulators."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.envrows import register_curriculum
from rallypoint.trainer.elastic.registry import StateRegistry
from rallypoint.trainer.envs.backends import find_backend
from rallypoint.trainer.envs.base import EnvRequest, VecEnv
from rallypoint.trainer.envs.simulator import RebuiltEnv
from rallypoint.trainer.envs.simulators.terrain import find_levels
from tests.fakes import isaaclab_stub
from tests.fakes.isaaclab_stub import LEVELS, ROUGH, TASK
from tests.fakes.training import Worker, config, make_worker

STUB = EnvSection(backend="isaaclab", task=ROUGH, block=8)
NAME = "curriculum/terrain_levels"


def rough(env: EnvSection, blocks: range, rollout_steps: int) -> Worker:
    """A worker of a job on a terrain."""
    job = replace(config(dtype="float32", rollout_steps=rollout_steps), env=env)
    return make_worker(job, [*blocks])


def train(worker: Worker, iterations: int) -> Tensor:
    """The shares of the job after these iterations, live."""
    shares = worker.live()[NAME]
    for iteration in range(1, iterations + 1):
        rollout = worker.collect(iteration)
        worker.update(rollout, SingleProcess(), iteration)
        worker.finish(rollout, SingleProcess())
        simulations(worker.env).advance(worker.history[-1])
    return shares


def simulations(env: VecEnv) -> RebuiltEnv:
    """The env, which is made of simulations."""
    assert isinstance(env, RebuiltEnv)
    return env


def terrain_of(env: VecEnv) -> Any:
    """The terrain of the simulation that runs now."""
    simulator: Any = simulations(env)._present
    return simulator._env.scene.terrain


def shares_of(terrain: Any) -> Tensor:
    """How its envs are spread over the levels. Each stands on the level that it is said to be on."""
    levels: Tensor = terrain.terrain_levels
    at = terrain.terrain_origins[levels, terrain.terrain_types]
    assert torch.equal(terrain.env_origins, at)
    return torch.bincount(levels, minlength=terrain.terrain_origins.shape[0]) / levels.numel()


def put_on(terrain: Any, levels: Tensor) -> None:
    """Raise the envs to these levels, as a policy that has learned would."""
    terrain.terrain_levels[:] = levels
    terrain.env_origins[:] = terrain.terrain_origins[levels, terrain.terrain_types]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> isaaclab_stub.Stub:
    return isaaclab_stub.install(monkeypatch, kit=False)


def test_a_new_job_begins_on_the_levels_that_the_task_drew(stub: isaaclab_stub.Stub) -> None:
    worker = rough(STUB, range(1), 30)
    assert worker.live()[NAME].tolist() == [0.0] * LEVELS
    worker.env.assign(np.arange(64), iteration=1)  # another simulation, before anything is known
    levels = terrain_of(worker.env).terrain_levels
    assert levels.unique().tolist() == [0, 1], "no reset has moved them up"
    worker.env.close()


def test_the_shares_are_those_of_the_env_steps(stub: isaaclab_stub.Stub) -> None:
    worker = rough(STUB, range(8), 1)
    put_on(terrain_of(worker.env), torch.tensor([3] * 16 + [4] * 48))
    shares = train(worker, 1)
    assert shares.tolist() == [0.0, 0.0, 0.0, 0.25, 0.75]
    figures = worker.history[0]
    assert [figures[f"figure/terrain_level_{k}"] for k in range(LEVELS)] == shares.tolist()
    worker.env.close()


@pytest.mark.slow
def test_a_simulation_that_is_built_anew_goes_on_with_the_levels_of_the_job(
    stub: isaaclab_stub.Stub,
) -> None:
    worker = rough(STUB, range(4), 30)
    shares = train(worker, 3).clone()
    assert shares[2:].sum() > 0.3, "they have climbed"
    assert (shares > 0).sum() > 2, "there is a spread"
    worker.env.assign(np.arange(2000), iteration=4)
    assert worker.env.builds == 3
    found = shares_of(terrain_of(worker.env))
    assert (found - shares).abs().amax() < 0.03
    assert (found[shares == 0] == 0).all()
    worker.env.close()


@pytest.mark.slow
def test_a_successor_goes_on_with_the_levels_that_it_receives(stub: isaaclab_stub.Stub) -> None:
    first = rough(STUB, range(4), 30)
    train(first, 3)
    first.env.close()
    drawn = []
    for ids in (np.arange(64), np.arange(64), np.arange(64, 128)):
        env = find_backend("isaaclab")(EnvRequest(ROUGH, seed=1, num_envs=64))
        registry = StateRegistry()
        register_curriculum(registry, env)
        registry.shared()[NAME].copy_(first.live()[NAME])
        env.assign(ids, iteration=4)
        assert shares_of(terrain_of(env))[2:].sum() > 0.3
        drawn.append(terrain_of(env).terrain_levels.tolist())
        env.close()
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2], "they are keyed by env"


def test_only_whole_episodes_move_an_env(stub: isaaclab_stub.Stub) -> None:
    worker = rough(STUB, range(4), 1)
    before = terrain_of(worker.env).terrain_levels.clone()
    ends = torch.zeros(32, dtype=torch.long)
    worker.env.begin_rollout(1)
    for _ in range(2 * isaaclab_stub.LIMIT):
        step = worker.env.step(torch.zeros(32, 1))
        ends += step.terminated | step.truncated
        climbed = terrain_of(worker.env).terrain_levels - before
        few = ends <= LEVELS - before  # not beyond the last, from where a random one follows
        assert torch.equal(climbed[few], (ends[few] - 1).clamp_min(0))
    assert ends.min() >= 2
    worker.env.close()


def test_levels_of_a_warm_up_are_not_kept(stub: isaaclab_stub.Stub) -> None:
    worker = rough(STUB, range(4), 30)
    worker.collect(0)
    worker.live()[NAME].copy_(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]))  # the state is received
    worker.env.assign(np.arange(0), iteration=9)
    begun = worker.env.assign(np.arange(32), iteration=9)
    assert (begun.size, worker.env.builds) == (32, 2)
    assert shares_of(terrain_of(worker.env))[3] == 1.0
    worker.env.close()


def test_with_kit_an_env_that_comes_back_is_on_a_level_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isaaclab_stub.install(monkeypatch, kit=True)
    env = simulations(find_backend("isaaclab")(EnvRequest(ROUGH, seed=1, num_envs=32)))
    env.assign(np.arange(32), iteration=1)
    shares = [0.0, 0.0, 0.0, 1.0, 0.0]
    env.advance({f"figure/terrain_level_{k}": share for k, share in enumerate(shares)})
    env.assign(np.arange(8), iteration=2)
    put_on(terrain_of(env), torch.tensor([4] * 8 + [0] * 24))  # robots that nobody drives sink
    env.assign(np.arange(32), iteration=3)
    assert env.builds == 1
    assert terrain_of(env).terrain_levels.tolist() == [4] * 8 + [3] * 24
    assert shares_of(terrain_of(env))[3] == 0.75
    env.close()


def test_origins_follow_where_no_term_of_the_task_moves_them() -> None:
    terrain = isaaclab_stub.Terrain(64)
    levels = find_levels(terrain)
    assert levels is not None
    levels.shares = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5], dtype=torch.float64)
    levels.begin(np.arange(32), np.arange(32) * 1000)
    assert shares_of(terrain)[2:].sum() == 0.5
    levels.release()
    up = torch.ones(64, dtype=torch.bool)
    terrain.update_env_origins(torch.arange(64), up, ~up)
    assert shares_of(terrain)[3] > 0, "the terrain is its own again"


@pytest.mark.parametrize("missing", ["terrain", "generator", "order", "origins"])
def test_what_is_no_terrain_with_levels(missing: str) -> None:
    terrain = isaaclab_stub.Terrain(8)
    if missing == "generator":
        terrain.cfg.terrain_generator = None
    elif missing == "order":
        terrain.cfg.terrain_generator.curriculum = False
    elif missing == "origins":
        terrain.terrain_origins = None
    assert find_levels(None if missing == "terrain" else terrain) is None


def test_without_a_terrain_there_is_no_curriculum(stub: isaaclab_stub.Stub) -> None:
    worker = rough(replace(STUB, task=TASK), range(1), 2)
    assert not any(name.startswith("curriculum") for name in worker.live())
    worker.env.begin_rollout(1)
    assert worker.env.step(torch.zeros(8, 1)).figures == {}
    worker.env.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of the simulators
@pytest.mark.parametrize(
    ("backend", "task", "overrides"),
    [
        ("isaaclab", "Isaac-Velocity-Rough-UnitreeGo2", ("physics=newton_mjwarp",)),
        ("mjlab", "Mjlab-Velocity-Rough-Unitree-Go1", ()),
    ],
)
def test_levels_outlive_the_simulation(
    backend: str,
    task: str,
    overrides: tuple[str, ...],
    need: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> None:
    need(backend)
    if backend == "isaaclab":
        request.getfixturevalue("assets")
    generator = "scene.terrain.terrain_generator"
    small = ("num_rows=4", "num_cols=3", "size=[4.0, 4.0]", "border_width=1.0")
    env = EnvSection(
        backend=backend,
        task=task,
        block=8,
        overrides=(
            *(f"{generator}.{setting}" for setting in small),
            "scene.terrain.max_init_terrain_level=0",
            "episode_length_s=0.2",
            *overrides,
        ),
    )
    worker = rough(env, range(2), 8)  # 8 of the 10 steps of an episode
    terrain = terrain_of(worker.env)
    assert terrain.terrain_levels.tolist() == [0] * 16, "no reset has moved them"
    put_on(terrain, torch.tensor([1] * 4 + [3] * 12))
    shares = train(worker, 1)
    assert shares.tolist() == [0.0, 0.25, 0.0, 0.75]

    worker.env.assign(np.arange(64), iteration=2)
    terrain = terrain_of(worker.env)
    found = shares_of(terrain)
    assert found[[0, 2]].tolist() == [0.0, 0.0]
    assert abs(found[3].item() - 0.75) < 0.15
    levels = terrain.terrain_levels.clone()
    terrain.cfg.terrain_generator.size = (0.0, 0.0)  # whoever is judged has walked far enough
    worker.env.begin_rollout(2)
    ends = torch.zeros(64, dtype=torch.long)
    climbed = 0
    for _ in range(20):
        step = worker.env.step(torch.zeros(64, 12))
        ends += step.terminated | step.truncated
        assert torch.equal(terrain.terrain_levels[ends < 2], levels[ends < 2])
        second = (ends == 2) & (levels == 1)
        assert (terrain.terrain_levels[second] == 2).all()
        climbed += int(second.sum())
    assert climbed > 0
    shares_of(terrain)
    worker.env.close()
