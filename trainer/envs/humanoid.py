"""``humanoid-track``: a humanoid follows reference motions; MuJoCo physics."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import EnvSpec
from rallypoint.trainer.envs.embedded import EMBEDDED, Array, Outcome, row_sum, total
from rallypoint.trainer.envs.humanoid_model import (
    END_EFFECTORS,
    JOINT_HIGH_RAD,
    JOINT_LOW_RAD,
    JOINTS,
    mjcf,
)
from rallypoint.trainer.envs.motions import FPS
from rallypoint.trainer.envs.mujoco_env import MujocoEnv, body_axes
from rallypoint.trainer.envs.reference import LIBRARY, reference
from rallypoint.trainer.rng import Purpose

STEP_DT_S: Final = 1 / FPS
ACTION_SCALE_RAD: Final = 0.25
ACTION_BOUND: Final = 4.0
ACTION_SMOOTHING: Final = 0.6
"""Part of the way from the last action to the new one that is gone per step."""
LEAD_IN_FRAMES: Final = 50
"""An episode starts up to this long before the frame that was drawn, so that a bin is also entered
from the one before it."""
PREVIEW_FRAMES: Final = 12
"""How far ahead of the next frame the policy sees the reference."""
START_JOINT_NOISE_RAD: Final = 0.03
GREATEST_HEIGHT_ERROR_M: Final = 0.12
LEAST_UPRIGHT: Final = 0.85
"""An episode is terminated when the cosine between the axis of the pelvis and that of the reference
falls below this (32 degrees), or its height is off by more than `GREATEST_HEIGHT_ERROR_M`."""
FALL_PENALTY: Final = 1.0
_N: Final = len(JOINTS)
_EE: Final = 3 * len(END_EFFECTORS)


class Weights:
    """Reward rates, per second, and the errors at which a tracking term has fallen to 1/e."""

    JOINT_POSITION, JOINT_POSITION_RAD = 1.5, 0.06
    JOINT_VELOCITY, JOINT_VELOCITY_RAD_S = 0.5, 1.2
    ROOT_HEIGHT, ROOT_HEIGHT_M = 0.4, 0.04
    ROOT_AXES, ROOT_AXES_RAD = 0.6, 0.2
    ROOT_PLACE, ROOT_PLACE_M = 0.4, 0.2
    END_EFFECTORS, END_EFFECTORS_M = 0.6, 0.06
    ACTION_CHANGE = -0.02


class HumanoidTrack(MujocoEnv):
    """Actions (20) are joint position targets off the reference, in units of `ACTION_SCALE_RAD`; a
    low-pass filter follows. The actor sees what a robot measures, and the reference; the critic also
    sees where the root and the end effectors are, how fast, the contact of the soles, and the clip.

    An episode starts in a bin of the library, drawn with the probabilities that were set; it is
    terminated when tracking fails, and truncated at the end of its clip."""

    start_draws = 3 + _N  # bin, frame, lead-in, joints

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        actor = 8 + 6 * _N + 4
        spec = EnvSpec(
            task="humanoid-track",
            obs_dims={"actor": actor, "critic": actor + 7 + _EE + 2 + 1 + len(LIBRARY.clips)},
            action_dim=_N,
            max_episode_steps=max(sum(frames) for frames in LIBRARY.bin_frames),
            step_dt_s=STEP_DT_S,
            capabilities=EMBEDDED,
            action_bound=ACTION_BOUND,
            action_names=tuple(joint.name for joint in JOINTS),
            library=LIBRARY,
        )
        self._reference = reference()
        lengths = np.array(LIBRARY.lengths, dtype=np.float64)
        self._cumulated = np.cumsum(lengths / lengths.sum())
        super().__init__(spec, mjcf(), seed=seed, dtype=dtype)

    def set_probabilities(self, probabilities: NDArray[np.float64]) -> None:
        """How often an episode starts in each bin, ``[B]``, from now on."""
        self._cumulated = np.cumsum(probabilities)

    def start_clips(self, clips: NDArray[np.int64]) -> dict[str, Tensor]:
        """Start an episode at frame 0 of these clips, ``[N]``, one per row, as the first thing in a
        rollout; the observations."""
        rows = np.arange(len(self._env_ids))
        draws = self._uniform(Purpose.ENV_RESET, rows, self.start_draws)
        self._episode_step[:] = 0
        self._place(rows, self._reference.first[clips], np.ascontiguousarray(draws[:, 3:]))
        return self._tensors(self._observe())

    def _allocate(self, count: int) -> dict[str, Array]:
        return super()._allocate(count) | {
            "frame": np.zeros(count),  # of all clips in a row
            "last_action": np.zeros((count, _N)),
            "end_effectors": np.zeros((count, _EE)),
            "touch_n": np.zeros((count, 2)),
        }

    def _start(self, rows: NDArray[np.int64], draws: Array) -> None:
        reference = self._reference
        bins = np.searchsorted(self._cumulated, draws[:, 0] * self._cumulated[-1], side="right")
        bins = np.minimum(bins, len(self._cumulated) - 1)
        within = np.floor(draws[:, 1] * reference.bin_frames[bins])
        frame = reference.bin_first[bins] + within - np.floor(draws[:, 2] * LEAD_IN_FRAMES)
        clip = reference.clip_of_bin[bins]
        # At least one step is left to the end of the clip.
        frame = np.clip(frame, reference.first[clip], reference.last[clip] - 1)
        self._place(rows, frame.astype(np.int64), np.ascontiguousarray(draws[:, 3:]))

    def _place(self, rows: NDArray[np.int64], frame: NDArray[np.int64], draws: Array) -> None:
        """Put rows into the pose and velocity of the reference, joints but for some noise."""
        self._reset_physics(rows)
        qpos = self._reference.qpos[frame]
        qpos[:, 7:] += START_JOINT_NOISE_RAD * (2.0 * draws - 1.0)
        self._view("qpos")[rows] = qpos
        self._view("qvel")[rows] = self._reference.qvel[frame]
        self._state["frame"][rows] = frame
        self._state["last_action"][rows] = 0.0
        self._state["end_effectors"][rows] = self._reference.end_effectors[frame]
        self._state["touch_n"][rows] = 0.0

    def _frame(self) -> NDArray[np.int64]:
        return self._state["frame"].astype(np.int64)

    def _timed_out(self) -> NDArray[np.bool_]:
        frame = self._frame()
        out: NDArray[np.bool_] = frame >= self._reference.last_of_frame[frame]
        return out

    def _advance(self, actions: Array) -> Outcome:
        self._state["frame"] += 1.0
        frame, reference = self._frame(), self._reference
        action = self._state["last_action"]
        change = ACTION_SMOOTHING * (np.clip(actions, -ACTION_BOUND, ACTION_BOUND) - action)
        action += change
        targets = reference.qpos[frame, 7:] + ACTION_SCALE_RAD * action
        sensors, diverged = self._simulate(np.clip(targets, JOINT_LOW_RAD, JOINT_HIGH_RAD))
        qpos = self._view("qpos")
        self._state["end_effectors"][:] = _off_root(sensors[:, :_EE], qpos)
        self._state["touch_n"][:] = sensors[:, _EE:]
        error = qpos[:, 7:] - reference.qpos[frame, 7:]
        place = qpos[:, :3] - reference.qpos[frame, :3]
        up = np.stack(body_axes(qpos[:, 3:7])[2], axis=1)
        tipped = row_sum(up * reference.up[frame]) < LEAST_UPRIGHT
        terminated = diverged | tipped | (np.abs(place[:, 2]) > GREATEST_HEIGHT_ERROR_M)
        terms = self._terms(frame, error, place) | {
            "action_change": Weights.ACTION_CHANGE * row_sum(change**2)
        }
        rate = total(terms)
        bound = np.maximum(rate, 0.0)
        figures = {
            "tracking_error_rad": np.sqrt(row_sum(error**2) / _N),
            "root_error_m": np.sqrt(row_sum(place**2)),
        }
        return Outcome(
            STEP_DT_S * bound - FALL_PENALTY * terminated,
            terminated,
            figures,
            bins=reference.bin_of_frame[frame],
            reward_terms={
                **{name: STEP_DT_S * one for name, one in terms.items()},
                "bound": STEP_DT_S * (bound - rate),
                "fall": np.where(terminated, -FALL_PENALTY, 0.0),
            },
        )

    def _terms(self, frame: NDArray[np.int64], error: Array, place: Array) -> dict[str, Array]:
        """Rates of the tracking terms, by name."""
        reference, w = self._reference, Weights
        forward, _, up = body_axes(self._view("qpos")[:, 3:7])
        axes = np.stack([*forward, *up], axis=1) - reference.axes[frame]
        velocity = self._view("qvel")[:, 6:] - reference.qvel[frame, 6:]
        hands = self._state["end_effectors"] - reference.end_effectors[frame]
        return {
            "joint_position": w.JOINT_POSITION
            * _closeness(row_sum(error**2) / _N, w.JOINT_POSITION_RAD),
            "joint_velocity": w.JOINT_VELOCITY
            * _closeness(row_sum(velocity**2) / _N, w.JOINT_VELOCITY_RAD_S),
            "root_height": w.ROOT_HEIGHT * _closeness(place[:, 2] ** 2, w.ROOT_HEIGHT_M),
            "root_axes": w.ROOT_AXES * _closeness(row_sum(axes**2), w.ROOT_AXES_RAD),
            "root_place": w.ROOT_PLACE * _closeness(row_sum(place[:, :2] ** 2), w.ROOT_PLACE_M),
            "end_effectors": w.END_EFFECTORS
            * _closeness(row_sum(hands**2) / len(END_EFFECTORS), w.END_EFFECTORS_M),
        }

    def _observe(self) -> dict[str, Array]:
        frame, reference = self._frame(), self._reference
        ahead = np.minimum(frame + 1, reference.last_of_frame[frame])
        far = np.minimum(ahead + PREVIEW_FRAMES, reference.last_of_frame[frame])
        qpos, qvel = self._view("qpos"), self._view("qvel")
        forward, left, up = body_axes(qpos[:, 3:7])
        actor = [
            np.stack([forward[2], left[2], up[2], forward[0], forward[1]], axis=1),
            qvel[:, 3:6],
            qpos[:, 7:] - reference.stand,
            qvel[:, 6:],
            self._state["last_action"],
            reference.qpos[ahead, 7:] - qpos[:, 7:],
            reference.qvel[ahead, 6:],
            reference.qpos[far, 7:] - reference.qpos[ahead, 7:],
            reference.qpos[ahead, 2:3],
            reference.up[ahead],
        ]
        vx, vy, vz = qvel[:, :3].T
        clip = reference.clip_of_bin[reference.bin_of_frame[frame]]
        privileged = [
            np.stack([vx * a + vy * b + vz * c for a, b, c in (forward, left, up)], axis=1),
            qpos[:, 2:3],
            qpos[:, :3] - reference.qpos[frame, :3],
            self._state["end_effectors"] - reference.end_effectors[frame],
            np.minimum(self._state["touch_n"] / 200.0, 2.0),
            reference.progress[frame][:, None],
            np.eye(len(LIBRARY.clips))[clip],
        ]
        return {
            "actor": np.concatenate(actor, axis=1),
            "critic": np.concatenate(actor + privileged, axis=1),
        }


def _closeness(error_squared: Array, scale: float) -> Array:
    """1 without error, 1/e at an error of ``scale``."""
    close: Array = np.exp(-error_squared / scale**2)
    return close


def _off_root(positions: Array, qpos: Array) -> Array:
    """End effectors ``[N, 3 K]`` relative to the root, axes of the world."""
    relative: Array = positions - np.tile(qpos[:, :3], (1, len(END_EFFECTORS)))
    return relative
