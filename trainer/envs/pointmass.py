"""``pointmass``: a point on a plane, driven to a target; steps hundreds of envs in a millisecond."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import EnvSpec, Scene
from rallypoint.trainer.envs.embedded import EMBEDDED, Array, EmbeddedEnv, Outcome, between, row_sum

STEP_DT_S: Final = 0.1
MAX_ACCELERATION_M_S2: Final = 2.0
DAMPING_PER_S: Final = 0.5
START_RANGE_M: Final = 1.0
TARGET_RANGE_M: Final = 1.0
ARENA_RADIUS_M: Final = 2.5
"""An episode is terminated out here."""
LEAVE_PENALTY: Final = 0.5


SCENE: Final = f"""
<mujoco model="pointmass">
  <worldbody>
    <geom type="plane" size="0 0 1"/>
    <body name="point" pos="0 0 0.1">
      <joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 1 0"/>
      <geom type="box" size="0.1 0.1 0.1"/>
    </body>
    <body name="target" pos="0 0 0.02">
      <joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 1 0"/>
      <geom type="sphere" size="0.08"/>
    </body>
    <geom type="cylinder" fromto="0 0 -0.01 0 0 0.005" size="{ARENA_RADIUS_M}"/>
  </worldbody>
</mujoco>
"""
"""Point and target, to look at."""


class PointMass(EmbeddedEnv):
    """Double integrator with damping; actions are accelerations in units of the greatest.

    Observation (6): vector to the target, velocity, position. Reward rate, per second: 1 at the
    target, falling with distance, less a little for effort.
    """

    start_draws = 4

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        spec = EnvSpec(
            task="pointmass",
            obs_dims={"actor": 6},
            action_dim=2,
            max_episode_steps=50,
            step_dt_s=STEP_DT_S,
            capabilities=EMBEDDED,
            action_bound=1.0,
            action_names=("x", "y"),
        )
        super().__init__(spec, seed=seed, dtype=dtype)

    @property
    def scene(self) -> Scene:
        """The arena from outside."""
        return Scene(SCENE, 4.0 * ARENA_RADIUS_M, follows=False)

    def positions(self) -> Array:
        """Of the point and of its target, ``[N, 4]``, fresh."""
        return np.concatenate([self._state["position"], self._state["target"]], axis=1)

    def close(self) -> None:
        """Nothing is held."""

    def _allocate(self, count: int) -> dict[str, Array]:
        return {name: np.zeros((count, 2)) for name in ("position", "velocity", "target")}

    def _start(self, rows: NDArray[np.int64], draws: Array) -> None:
        self._state["position"][rows] = between(draws[:, :2], -START_RANGE_M, START_RANGE_M)
        self._state["target"][rows] = between(draws[:, 2:], -TARGET_RANGE_M, TARGET_RANGE_M)
        self._state["velocity"][rows] = 0.0

    def _advance(self, actions: Array) -> Outcome:
        position, velocity = self._state["position"], self._state["velocity"]
        force = np.clip(actions, -1.0, 1.0)
        velocity += STEP_DT_S * (MAX_ACCELERATION_M_S2 * force - DAMPING_PER_S * velocity)
        position += STEP_DT_S * velocity
        distance = np.sqrt(row_sum((self._state["target"] - position) ** 2))
        terminated = row_sum(position**2) > ARENA_RADIUS_M**2
        rate = 1.0 / (1.0 + distance) - 0.02 * row_sum(force**2)
        reward = STEP_DT_S * rate - LEAVE_PENALTY * terminated
        return Outcome(reward, terminated, {"distance_m": distance})

    def _observe(self) -> dict[str, Array]:
        state = self._state
        to_target = state["target"] - state["position"]
        return {"actor": np.concatenate([to_target, state["velocity"], state["position"]], axis=1)}
