"""Reference motions of ``humanoid-track``, made in code: paths of the pelvis, the feet and the arms,
turned into joint angles by the closed-form kinematics of a leg.

A clip begins and ends standing still. Stepping clips sway as a linear inverted pendulum must: with
the pelvis at ``Y sin(w t)`` the zero-moment point is at ``Y (1 + w^2 h / g) sin(w t)``, which has to be
under the foot that stands (Kajita et al., "The 3D linear inverted pendulum mode", IROS 2001).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rallypoint.trainer.envs.embedded import Array
from rallypoint.trainer.envs.humanoid_model import (
    HIP_M,
    JOINTS,
    SHANK_M,
    SOLE_M,
    THIGH_M,
    joint_index,
)

FPS: Final = 50
RAMP_S: Final = 1.0
"""A motion grows and fades over this long."""
STAND_LEG_M: Final = 0.585
"""Hip to ankle while standing: knees slightly bent."""
PELVIS_M: Final = 0.03
"""The pelvis is this far before the ankles: over the middle of the feet."""
ZMP_M: Final = 0.105
"""Greatest excursion of the zero-moment point while stepping: a little beyond a foot's middle."""
COM_HEIGHT_M: Final = 0.72
GRAVITY_M_S2: Final = 9.81
LIFT_FROM: Final = 0.4
"""A foot is in the air while the sway to the other side is beyond this part of its greatest."""
ARM_ROLL_RAD: Final = 0.15
ELBOW_RAD: Final = -0.4


@dataclass
class Path:
    """What a clip prescribes, by frame ``[F]``: metres and radians, zero where nothing is said."""

    frames: int
    values: dict[str, Array] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.values.get(name, np.zeros(self.frames))


@dataclass(frozen=True)
class Clip:
    """One reference motion."""

    name: str
    seconds: float
    stepping: bool
    """Feet leave the ground."""
    make: Callable[[Array, Array], dict[str, Array]]
    """Time (s) and envelope (0 … 1) by frame, to named paths of `Path`."""

    @property
    def frames(self) -> int:
        """Frames at `FPS`; the first and the last are standing still."""
        return round(self.seconds * FPS)


def clip_qpos(clip: Clip) -> Array:
    """Generalised positions of a clip, ``[F, 7 + joints]``: root position (m), root quaternion
    (w x y z), joint angles (rad)."""
    t_s = np.arange(clip.frames) / FPS
    rise = np.clip(np.minimum(t_s, clip.seconds - 1 / FPS - t_s) / RAMP_S, 0.0, 1.0)
    path = Path(clip.frames, clip.make(t_s, rise * rise * (3.0 - 2.0 * rise)))
    pitch, roll = path["pelvis_pitch"], path["pelvis_roll"]
    pelvis = np.stack(
        [np.full_like(t_s, PELVIS_M), path["sway"], STAND_LEG_M + SOLE_M - path["down"]], axis=1
    )
    rotation = _ry(pitch) @ _rx(roll)
    joints = np.zeros((clip.frames, len(JOINTS)))
    joints[:, joint_index("waist_roll")] = path["waist_roll"]
    joints[:, joint_index("waist_pitch")] = path["waist_pitch"]
    for side, sign in (("left", 1), ("right", -1)):
        ankle = np.stack(
            [np.zeros_like(t_s), np.full_like(t_s, sign * HIP_M), SOLE_M + path[f"{side}_lift"]],
            axis=1,
        )
        hip = pelvis + rotation @ np.array([0.0, sign * HIP_M, 0.0])
        first = joint_index(f"{side}_hip_yaw")
        joints[:, first : first + 6] = _leg_angles(ankle - hip, rotation)
        first = joint_index(f"{side}_shoulder_pitch")
        joints[:, first] = path[f"{side}_arm"]
        joints[:, first + 1] = sign * (ARM_ROLL_RAD + path["arms_out"])
        joints[:, first + 2] = ELBOW_RAD + path[f"{side}_elbow"]
    half_p, half_r = pitch / 2, roll / 2
    quaternion = np.stack(
        [
            np.cos(half_p) * np.cos(half_r),
            np.cos(half_p) * np.sin(half_r),
            np.sin(half_p) * np.cos(half_r),
            -np.sin(half_p) * np.sin(half_r),
        ],
        axis=1,
    )
    return np.concatenate([pelvis, quaternion, joints], axis=1)


def _leg_angles(reach: Array, pelvis: Array) -> Array:
    """Angles of hip yaw, roll, pitch, knee, ankle pitch, roll ``[F, 6]`` that put the ankle at
    ``reach`` ``[F, 3]`` from the hip, in the world, with the sole level; ``pelvis`` is its rotation
    ``[F, 3, 3]``."""
    x, y, z = np.einsum("fji,fj->if", pelvis, reach)
    roll = np.arctan2(y, -z)
    length = np.sqrt(x * x + y * y + z * z)
    cosine = (length**2 - THIGH_M**2 - SHANK_M**2) / (2 * THIGH_M * SHANK_M)
    knee = np.arccos(np.clip(cosine, -1.0, 1.0))
    along = np.arctan2(-x, np.sqrt(y * y + z * z))
    pitch = along - np.arctan2(SHANK_M * np.sin(knee), THIGH_M + SHANK_M * np.cos(knee))
    # The rest of the rotation, to level: Ry(ankle pitch) Rx(ankle roll).
    rest = (pelvis @ _rx(roll) @ _ry(pitch + knee)).transpose(0, 2, 1)
    ankle_pitch = np.arctan2(-rest[:, 2, 0], rest[:, 0, 0])
    ankle_roll = np.arctan2(-rest[:, 1, 2], rest[:, 1, 1])
    return np.stack([np.zeros_like(roll), roll, pitch, knee, ankle_pitch, ankle_roll], axis=1)


def _rx(angle: Array) -> Array:
    c, s, o, i = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    return np.stack([i, o, o, o, c, -s, o, s, c], axis=1).reshape(-1, 3, 3)


def _ry(angle: Array) -> Array:
    c, s, o, i = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    return np.stack([c, o, s, o, i, o, -s, o, c], axis=1).reshape(-1, 3, 3)


# The library -------------------------------------------------------------------------------------


def _stand() -> Callable[[Array, Array], dict[str, Array]]:
    return lambda t_s, envelope: {}


def _squat(depth_m: float, period_s: float) -> Callable[[Array, Array], dict[str, Array]]:
    def make(t_s: Array, envelope: Array) -> dict[str, Array]:
        down = 0.5 * envelope * (1.0 - np.cos(2 * np.pi * t_s / period_s))
        return {
            "down": depth_m * down,
            "pelvis_pitch": 1.2 * depth_m * down,
            "left_arm": -4.0 * depth_m * down,
            "right_arm": -4.0 * depth_m * down,
        }

    return make


def _sway(reach_m: float, period_s: float) -> Callable[[Array, Array], dict[str, Array]]:
    def make(t_s: Array, envelope: Array) -> dict[str, Array]:
        side = envelope * np.sin(2 * np.pi * t_s / period_s)
        return {"sway": reach_m * side, "waist_roll": 2.0 * reach_m * side, "down": 0.02 * envelope}

    return make


def _arm_swing(reach_rad: float, period_s: float) -> Callable[[Array, Array], dict[str, Array]]:
    def make(t_s: Array, envelope: Array) -> dict[str, Array]:
        swing = reach_rad * envelope * np.sin(2 * np.pi * t_s / period_s)
        return {"left_arm": swing, "right_arm": -swing, "arms_out": 0.2 * envelope}

    return make


def _step(
    lift_m: float, period_s: float, *, arm_rad: float = 0.0, end_period_s: float | None = None
) -> Callable[[Array, Array], dict[str, Array]]:
    """Steps on the spot; the period of a left and a right step goes to ``end_period_s``."""

    def make(t_s: Array, envelope: Array) -> dict[str, Array]:
        slow, fast = 1.0 / period_s, 1.0 / (end_period_s or period_s)
        share = t_s / t_s[-1]
        phase = 2 * np.pi * (slow * t_s + 0.5 * (fast - slow) * share * t_s)
        omega = 2 * np.pi * (slow + (fast - slow) * share)
        side = np.sin(phase)
        rise = {
            foot: np.clip((sign * side - LIFT_FROM) / (1.0 - LIFT_FROM), 0.0, 1.0)
            for foot, sign in (("left", -1), ("right", 1))  # the right foot, while over the left
        }
        swing = arm_rad * envelope * side
        return {
            "sway": envelope * ZMP_M / (1.0 + omega**2 * COM_HEIGHT_M / GRAVITY_M_S2) * side,
            "left_lift": lift_m * envelope * rise["left"] ** 2 * (3.0 - 2.0 * rise["left"]),
            "right_lift": lift_m * envelope * rise["right"] ** 2 * (3.0 - 2.0 * rise["right"]),
            "down": 0.015 * envelope,
            "left_arm": swing,
            "right_arm": -swing,
        }

    return make


CLIPS: Final = (
    Clip("stand", 5.0, False, _stand()),
    Clip("squat_slow", 7.0, False, _squat(0.12, 3.0)),
    Clip("squat_fast", 6.0, False, _squat(0.15, 1.5)),
    Clip("sway_slow", 7.0, False, _sway(0.05, 3.0)),
    Clip("sway_fast", 6.0, False, _sway(0.04, 1.4)),
    Clip("arm_swing_slow", 6.0, False, _arm_swing(0.6, 2.0)),
    Clip("arm_swing_fast", 5.5, False, _arm_swing(0.9, 0.9)),
    Clip("march_slow", 7.0, True, _step(0.06, 1.6)),
    Clip("march_fast", 6.5, True, _step(0.1, 1.2)),
    Clip("walk_in_place_slow", 7.0, True, _step(0.04, 1.5, arm_rad=0.3)),
    Clip("walk_in_place_fast", 6.5, True, _step(0.05, 0.9, arm_rad=0.5)),
    Clip("march_accelerating", 9.0, True, _step(0.1, 1.2, arm_rad=0.5, end_period_s=0.6)),
)
"""All clips of the library, by difficulty."""
