"""``quadruped-velocity``: a four-legged robot follows commanded velocities; MuJoCo physics."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import EnvSpec
from rallypoint.trainer.envs.embedded import EMBEDDED, Array, Outcome, row_sum, total
from rallypoint.trainer.envs.mujoco_env import MujocoEnv, body_axes
from rallypoint.trainer.envs.quadruped_model import (
    DAMPING_N_M_S_RAD,
    DEFAULT_POSE_RAD,
    JOINT_NAMES,
    LEGS,
    STAND_HEIGHT_M,
    STIFFNESS_N_M_RAD,
    mjcf,
)
from rallypoint.trainer.rng import Purpose

STEP_DT_S: Final = 0.02
EPISODE_STEPS: Final = 1000
COMMAND_STEPS: Final = 250
"""A new command is drawn each time an episode has gone this many steps further."""
COMMAND_LOW: Final = np.array([-0.5, -0.3, -0.6])
COMMAND_HIGH: Final = np.array([1.0, 0.3, 0.6])
"""Ranges of the command: forward and lateral velocity (m/s), yaw rate (rad/s)."""
ACTION_SCALE_RAD: Final = 0.25
ACTION_BOUND: Final = 4.0
ACTION_SMOOTHING: Final = 0.7
"""Part of the way from the last action to the new one that is gone per step: a low-pass filter, so
that exploration noise moves the legs instead of shaking them."""
START_JOINT_NOISE_RAD: Final = 0.1
LEAST_HEIGHT_M: Final = 0.17
GREATEST_TILT_GRAVITY: Final = -0.5
"""An episode is terminated when gravity's z in the base frame exceeds this (60 degrees of tilt)."""
CONTACT_FORCE_N: Final = 1.0
SWING_TARGET_S: Final = 0.3
HEIGHT_TARGET_M: Final = 0.28
TRACKING_VARIANCE: Final = 0.25
FALL_PENALTY: Final = 1.0
LEAST_REWARD_RATE: Final = -2.0


class Weights:
    """Reward rates, per second."""

    LINEAR_TRACKING = 1.5
    YAW_TRACKING = 0.75
    VERTICAL_VELOCITY = -2.0
    ROLL_PITCH_RATE = -0.05
    TILT = -2.5
    HEIGHT = -20.0
    ACTION_CHANGE = -0.01
    TORQUE = -2e-4
    SWING = 0.25
    TROT = 0.5


@dataclass(frozen=True)
class _BaseMotion:
    """Motion of the base in its own frame, ``[N, 3]`` each."""

    linear_m_s: Array
    angular_rad_s: Array
    gravity: Array
    """Unit vector of gravity."""


class QuadrupedVelocity(MujocoEnv):
    """Observation (48): base linear and angular velocity and gravity direction in the base frame,
    command, joint positions off the default pose, joint velocities, last filtered action. Actions
    (12) are joint position targets off the default pose, in units of `ACTION_SCALE_RAD`; a low-pass
    filter follows. An episode is terminated when the base tips over or sinks."""

    start_draws = 1 + 12 + 3  # yaw, joints, command
    view_distance_m = 1.7

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        spec = EnvSpec(
            task="quadruped-velocity",
            obs_dims={"actor": 48},
            action_dim=12,
            max_episode_steps=EPISODE_STEPS,
            step_dt_s=STEP_DT_S,
            capabilities=EMBEDDED,
            action_bound=ACTION_BOUND,
            action_names=JOINT_NAMES,
        )
        super().__init__(spec, mjcf(), seed=seed, dtype=dtype)

    def _allocate(self, count: int) -> dict[str, Array]:
        return super()._allocate(count) | {
            "command": np.zeros((count, 3)),
            "last_action": np.zeros((count, 12)),
            "air_time_s": np.zeros((count, len(LEGS))),
        }

    def _start(self, rows: NDArray[np.int64], draws: Array) -> None:
        self._reset_physics(rows)
        half_yaw = np.pi * (np.ascontiguousarray(draws[:, 0]) - 0.5)
        zeros = np.zeros_like(half_yaw)
        height = np.full_like(half_yaw, STAND_HEIGHT_M)
        free = [zeros, zeros, height, np.cos(half_yaw), zeros, zeros, np.sin(half_yaw)]
        joints = DEFAULT_POSE_RAD + START_JOINT_NOISE_RAD * (2.0 * draws[:, 1:13] - 1.0)
        self._view("qpos")[rows] = np.concatenate([np.stack(free, axis=1), joints], axis=1)
        self._state["command"][rows] = _command(draws[:, 13:])
        self._state["last_action"][rows] = 0.0
        self._state["air_time_s"][rows] = 0.0

    def _advance(self, actions: Array) -> Outcome:
        action = self._state["last_action"]
        change = ACTION_SMOOTHING * (np.clip(actions, -ACTION_BOUND, ACTION_BOUND) - action)
        action += change
        feet_n, diverged = self._simulate(DEFAULT_POSE_RAD + ACTION_SCALE_RAD * action)
        base = self._base_motion()
        error = self._state["command"][:, :2] - base.linear_m_s[:, :2]
        error_squared = row_sum(error**2)
        rates = self._reward_rates(base, error_squared, change) | self._gait_rates(feet_n)
        rate = total(rates)
        height = self._view("qpos")[:, 2]
        tipped = base.gravity[:, 2] > GREATEST_TILT_GRAVITY
        terminated = diverged | tipped | (height < LEAST_HEIGHT_M)
        reward = STEP_DT_S * np.maximum(rate, LEAST_REWARD_RATE) - FALL_PENALTY * terminated
        self._renew_commands()
        bound = STEP_DT_S * (np.maximum(rate, LEAST_REWARD_RATE) - rate)
        terms: dict[str, Array] = {
            **{name: STEP_DT_S * one for name, one in rates.items()},
            "bound": bound,
            "fall": np.where(terminated, -FALL_PENALTY, 0.0),
        }
        figures = {"velocity_error_m_s": np.sqrt(error_squared)}
        return Outcome(reward, terminated, figures, reward_terms=terms)

    def _observe(self) -> dict[str, Array]:
        base = self._base_motion()
        parts = [
            base.linear_m_s,
            base.angular_rad_s,
            base.gravity,
            self._state["command"],
            self._view("qpos")[:, 7:] - DEFAULT_POSE_RAD,
            self._view("qvel")[:, 6:],
            self._state["last_action"],
        ]
        return {"actor": np.concatenate(parts, axis=1)}

    def _reward_rates(
        self, base: _BaseMotion, error_squared: Array, change: Array
    ) -> dict[str, Array]:
        """Terms of the reward, per second."""
        yaw_error = self._state["command"][:, 2] - base.angular_rad_s[:, 2]
        torque = (
            STIFFNESS_N_M_RAD * (self._view("ctrl") - self._view("qpos")[:, 7:])
            - DAMPING_N_M_S_RAD * self._view("qvel")[:, 6:]
        )
        yaw, height = yaw_error**2, self._view("qpos")[:, 2] - HEIGHT_TARGET_M
        return {
            "linear_tracking": Weights.LINEAR_TRACKING * np.exp(-error_squared / TRACKING_VARIANCE),
            "yaw_tracking": Weights.YAW_TRACKING * np.exp(-yaw / TRACKING_VARIANCE),
            "vertical_velocity": Weights.VERTICAL_VELOCITY * base.linear_m_s[:, 2] ** 2,
            "roll_pitch_rate": Weights.ROLL_PITCH_RATE * row_sum(base.angular_rad_s[:, :2] ** 2),
            "tilt": Weights.TILT * row_sum(base.gravity[:, :2] ** 2),
            "height": Weights.HEIGHT * height**2,
            "action_change": Weights.ACTION_CHANGE * row_sum(change**2),
            "torque": Weights.TORQUE * row_sum(torque**2),
        }

    def _gait_rates(self, feet_n: Array) -> dict[str, Array]:
        """Reward rates of the gait where the command asks for motion: for each foot that touches down
        now its time in the air above the target, and for standing on one diagonal pair of feet
        alone. Keeps the clock of each foot."""
        air_time_s = self._state["air_time_s"]
        contact = feet_n > CONTACT_FORCE_N
        landed = contact & (air_time_s > 0.0)
        air_time_s += STEP_DT_S
        swing = row_sum(np.where(landed, air_time_s - SWING_TARGET_S, 0.0))
        air_time_s[contact] = 0.0
        front_left, front_right, rear_left, rear_right = contact.T
        trot = (front_left == rear_right) & (front_right == rear_left) & (front_left != front_right)
        moving = row_sum(np.abs(self._state["command"][:, :2])) > 0.1
        return {"swing": moving * Weights.SWING * swing, "trot": moving * Weights.TROT * trot}

    def _renew_commands(self) -> None:
        """Draw new commands where it is time; never on an episode's last step."""
        step = self._episode_step
        due = np.flatnonzero((step % COMMAND_STEPS == 0) & (step < EPISODE_STEPS))
        if due.size:
            draws = self._uniform(Purpose.ENV_COMMAND, due, 3)
            self._state["command"][due] = _command(draws)

    def _base_motion(self) -> _BaseMotion:
        forward, left, up = body_axes(self._view("qpos")[:, 3:7])
        vx, vy, vz = self._view("qvel")[:, :3].T
        linear = [vx * a + vy * b + vz * c for a, b, c in (forward, left, up)]
        return _BaseMotion(
            linear_m_s=np.stack(linear, axis=1),
            angular_rad_s=self._view("qvel")[:, 3:6],
            gravity=-np.stack([forward[2], left[2], up[2]], axis=1),
        )


def _command(draws: Array) -> Array:
    """Uniform draws ``[K, 3]`` to commands."""
    command: Array = COMMAND_LOW + (COMMAND_HIGH - COMMAND_LOW) * draws
    return command
