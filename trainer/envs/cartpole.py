"""``cartpole``: balance a pole on a cart by pushing the cart; MuJoCo physics."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import EnvSpec
from rallypoint.trainer.envs.embedded import EMBEDDED, Array, Outcome, between, total
from rallypoint.trainer.envs.mujoco_env import MujocoEnv

STEP_DT_S: Final = 0.02
MAX_CART_POSITION_M: Final = 2.0
MAX_POLE_ANGLE_RAD: Final = 0.4
FALL_PENALTY: Final = 0.2
START_RANGE: Final = 0.1
"""Positions (m, rad) and velocities (m/s, rad/s) start within this of zero."""

MJCF: Final = """
<mujoco model="cartpole">
  <compiler angle="radian"/>
  <option timestep="0.01" integrator="implicitfast">
    <flag contact="disable"/>
  </option>
  <worldbody>
    <body name="cart">
      <joint name="slider" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="box" size="0.15 0.1 0.08" mass="1"/>
      <body name="pole">
        <joint name="hinge" type="hinge" axis="0 1 0" damping="0.002"/>
        <geom type="capsule" fromto="0 0 0 0 0 1" size="0.03" mass="0.2"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="slider" gear="6" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
</mujoco>
"""


class CartPole(MujocoEnv):
    """Observation (4): cart position, pole angle from upright, and their rates. Reward rate, per
    second: 1, less for angle and distance from the middle, less a little for effort; an episode is
    terminated when either leaves its bounds."""

    start_draws = 4

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        spec = EnvSpec(
            task="cartpole",
            obs_dims={"actor": 4},
            action_dim=1,
            max_episode_steps=300,
            step_dt_s=STEP_DT_S,
            capabilities=EMBEDDED,
            action_bound=1.0,
            action_names=("slider",),
        )
        super().__init__(spec, MJCF, seed=seed, dtype=dtype)

    def _start(self, rows: NDArray[np.int64], draws: Array) -> None:
        self._reset_physics(rows)
        start = between(draws, -START_RANGE, START_RANGE)
        self._view("qpos")[rows] = start[:, :2]
        self._view("qvel")[rows] = start[:, 2:]

    def _advance(self, actions: Array) -> Outcome:
        force = np.clip(actions, -1.0, 1.0)
        _, diverged = self._simulate(force)
        position, angle = np.abs(self._view("qpos")).T
        terminated = diverged | (position > MAX_CART_POSITION_M) | (angle > MAX_POLE_ANGLE_RAD)
        terms = {
            "alive": np.full_like(angle, STEP_DT_S),
            "angle": -0.5 * STEP_DT_S * (angle / MAX_POLE_ANGLE_RAD) ** 2,
            "position": -0.2 * STEP_DT_S * (position / MAX_CART_POSITION_M) ** 2,
            "effort": -0.01 * STEP_DT_S * force[:, 0] ** 2,
            "fall": -FALL_PENALTY * terminated,
        }
        figures = {"pole_angle_rad": angle}
        return Outcome(total(terms), terminated, figures, reward_terms=terms)

    def _observe(self) -> dict[str, Array]:
        return {"actor": np.concatenate([self._view("qpos"), self._view("qvel")], axis=1)}
