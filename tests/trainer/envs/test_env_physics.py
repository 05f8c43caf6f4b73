"""The two MuJoCo engines give the same bits."""

from importlib.util import find_spec
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from rallypoint.trainer.envs import physics as physics_module
from rallypoint.trainer.envs.cartpole import MJCF as CARTPOLE_MJCF
from rallypoint.trainer.envs.physics import (
    BatchPhysics,
    Physics,
    PoolPhysics,
    make_physics,
    state_slice,
)
from rallypoint.trainer.envs.quadruped import QuadrupedVelocity
from rallypoint.trainer.envs.quadruped_model import DEFAULT_POSE_RAD, mjcf

COUNT = 11
needs_batch = pytest.mark.skipif(find_spec("mujoco.batch") is None, reason="MuJoCo before 3.17")
MODELS = {
    "quadruped": mujoco.MjModel.from_xml_string(mjcf()),
    "cartpole": mujoco.MjModel.from_xml_string(CARTPOLE_MJCF),
}


def drive(engine: Physics, model: Any, steps: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """States and sensors of every control step under fixed controls, with contacts."""
    controls = np.random.default_rng(0).uniform(-0.5, 0.5, (steps, COUNT, model.nu))
    if model.nu == DEFAULT_POSE_RAD.size:
        controls = DEFAULT_POSE_RAD + controls
    states, sensors = [], []
    ctrl = state_slice(model, mujoco.mjtState.mjSTATE_CTRL)
    for control in controls:
        engine.state[:, ctrl] = control[: engine.state.shape[0]]
        engine.step(4)
        states.append(engine.state.copy())
        sensors.append(engine.sensors.copy())
    return np.array(states), np.array(sensors)


@needs_batch
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", list(MODELS))
def test_engines_agree_bit_for_bit(name: str, threads: int) -> None:
    model = MODELS[name]
    batch = BatchPhysics(model, COUNT)
    pool = PoolPhysics(model, COUNT, threads=threads)
    (states, sensors), (pool_states, pool_sensors) = drive(batch, model), drive(pool, model)
    assert np.array_equal(states, pool_states)
    assert np.array_equal(sensors, pool_sensors)
    assert np.isfinite(states).all()
    if name == "quadruped":
        assert (sensors > 1.0).any()  # feet did touch the ground
        assert len(np.unique(states[-1], axis=0)) == COUNT
    batch.close()
    pool.close()


@pytest.mark.parametrize("engine", [pytest.param(BatchPhysics, marks=needs_batch), PoolPhysics])
def test_engines_start_in_the_models_default_state(engine: type[PoolPhysics]) -> None:
    model = MODELS["quadruped"]
    fresh = engine(model, 3)
    qpos = fresh.state[:, state_slice(model, mujoco.mjtState.mjSTATE_QPOS)]
    assert np.array_equal(qpos, np.tile(model.qpos0, (3, 1)))
    assert fresh.sensors.shape == (3, model.nsensordata)
    empty = engine(model, 0)
    empty.step(4)
    assert empty.state.shape == (0, fresh.state.shape[1])
    assert empty.sensors.shape == (0, model.nsensordata)


@needs_batch
def test_an_env_gives_the_same_results_without_mujoco_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> list[torch.Tensor]:
        env = QuadrupedVelocity(seed=1, dtype=torch.float64)
        env.assign(np.arange(8), iteration=1)
        tensors = [env.begin_rollout(1)["actor"]]
        generator = torch.Generator().manual_seed(0)
        for step in range(60):
            if step == 30:
                env.assign(np.arange(4, 12), iteration=2)
            result = env.step(torch.randn(8, 12, generator=generator))
            tensors += [result.obs["actor"], result.reward, result.terminated]
        env.close()
        return tensors

    with_batch = run()
    # What an older MuJoCo looks like to us: the import failed.
    monkeypatch.setattr(physics_module, "Batch", None)
    assert isinstance(make_physics(MODELS["quadruped"], 2), PoolPhysics)
    assert all(torch.equal(a, b) for a, b in zip(with_batch, run(), strict=True))
