"""The MJCF of a generic 20-joint humanoid of about 35 kg, made of primitives; no asset files."""

from dataclasses import dataclass
from typing import Final

import numpy as np

HIP_M: Final = 0.09
"""Lateral offset of each hip from the pelvis; hips are at the pelvis' height."""
THIGH_M: Final = 0.3
SHANK_M: Final = 0.3
SOLE_M: Final = 0.05
"""Height of the ankle over the sole."""
SHOULDER_M: Final = (0.0, 0.17, 0.34)
"""Left shoulder in the frame of the torso."""
UPPER_ARM_M: Final = 0.22
FOREARM_M: Final = 0.2


@dataclass(frozen=True)
class Joint:
    """One actuated joint: an axis, a range and a servo."""

    name: str
    axis: str
    range_rad: tuple[float, float]
    stiffness_n_m_rad: float
    damping_n_m_s_rad: float
    limit_n_m: float


def _leg_joints(side: str) -> tuple[Joint, ...]:
    return (
        Joint(f"{side}_hip_yaw", "0 0 1", (-0.6, 0.6), 60.0, 3.0, 60.0),
        Joint(f"{side}_hip_roll", "1 0 0", (-0.6, 0.6), 120.0, 4.0, 90.0),
        Joint(f"{side}_hip_pitch", "0 1 0", (-1.8, 0.8), 100.0, 4.0, 90.0),
        Joint(f"{side}_knee", "0 1 0", (0.0, 2.4), 100.0, 4.0, 110.0),
        Joint(f"{side}_ankle_pitch", "0 1 0", (-1.0, 0.8), 120.0, 4.0, 60.0),
        Joint(f"{side}_ankle_roll", "1 0 0", (-0.5, 0.5), 80.0, 3.0, 40.0),
    )


def _arm_joints(side: str) -> tuple[Joint, ...]:
    return (
        Joint(f"{side}_shoulder_pitch", "0 1 0", (-2.5, 2.0), 30.0, 1.2, 25.0),
        Joint(f"{side}_shoulder_roll", "1 0 0", (-1.6, 1.6), 30.0, 1.2, 25.0),
        Joint(f"{side}_elbow", "0 1 0", (-2.2, 0.1), 20.0, 0.8, 20.0),
    )


_WAIST: Final = (
    Joint("waist_roll", "1 0 0", (-0.5, 0.5), 100.0, 4.0, 60.0),
    Joint("waist_pitch", "0 1 0", (-0.4, 0.8), 100.0, 4.0, 60.0),
)
JOINTS: Final = (
    *_WAIST,
    *_arm_joints("left"),
    *_arm_joints("right"),
    *_leg_joints("left"),
    *_leg_joints("right"),
)
"""In the order of the simulator's joints, and of the actuators."""
JOINT_LOW_RAD: Final = np.array([joint.range_rad[0] for joint in JOINTS])
JOINT_HIGH_RAD: Final = np.array([joint.range_rad[1] for joint in JOINTS])
STIFFNESS_N_M_RAD: Final = np.array([joint.stiffness_n_m_rad for joint in JOINTS])
DAMPING_N_M_S_RAD: Final = np.array([joint.damping_n_m_s_rad for joint in JOINTS])
END_EFFECTORS: Final = ("left_hand", "right_hand", "left_sole", "right_sole")
"""Sites; their positions in the world are the first sensors, the touch of both soles the last."""


def joint_index(name: str) -> int:
    """Place of a joint in `JOINTS`."""
    return [joint.name for joint in JOINTS].index(name)


def mjcf() -> str:
    """The model: position actuators in joint order; then the sensors."""
    joints = {joint.name: _joint(joint) for joint in JOINTS}
    arms = "".join(_arm(side, sign, joints) for side, sign in (("left", 1), ("right", -1)))
    legs = "".join(_leg(side, sign, joints) for side, sign in (("left", 1), ("right", -1)))
    actuators = "".join(
        f'<position joint="{j.name}" kp="{j.stiffness_n_m_rad}" kv="{j.damping_n_m_s_rad}" '
        f'forcerange="-{j.limit_n_m} {j.limit_n_m}"/>'
        for j in JOINTS
    )
    positions = "".join(f'<framepos objtype="site" objname="{name}"/>' for name in END_EFFECTORS)
    touch = "".join(f'<touch site="{name}"/>' for name in END_EFFECTORS[2:])
    # Robot geoms have contype 0 and the floor conaffinity 0: only soles against the floor collide.
    return f"""
<mujoco model="humanoid">
  <compiler angle="radian"/>
  <option timestep="0.01" integrator="implicitfast" iterations="10" ls_iterations="20"/>
  <default>
    <joint armature="0.02" damping="0.1"/>
    <geom contype="0" conaffinity="0"/>
    <default class="sole"><geom contype="0" conaffinity="1" friction="1 0.02 0.001"/></default>
  </default>
  <worldbody>
    <geom type="plane" size="0 0 1" contype="1"/>
    <body name="pelvis" pos="0 0 {THIGH_M + SHANK_M + SOLE_M}">
      <freejoint/>
      <geom type="box" size="0.07 0.1 0.06" mass="5"/>
      <body name="torso" pos="0 0 0.08">
        {joints["waist_roll"]}{joints["waist_pitch"]}
        <geom type="box" size="0.08 0.13 0.16" pos="0 0 0.18" mass="11"/>
        <geom type="sphere" size="0.09" pos="0 0 0.46" mass="2.5"/>{arms}
      </body>{legs}
    </body>
  </worldbody>
  <actuator>{actuators}</actuator>
  <sensor>{positions}{touch}</sensor>
</mujoco>
"""


def _joint(joint: Joint) -> str:
    low, high = joint.range_rad
    return f'<joint name="{joint.name}" axis="{joint.axis}" range="{low} {high}"/>'


def _arm(side: str, sign: int, joints: dict[str, str]) -> str:
    x, y, z = SHOULDER_M
    return f"""
        <body name="{side}_upper_arm" pos="{x} {sign * y} {z}">
          {joints[f"{side}_shoulder_pitch"]}{joints[f"{side}_shoulder_roll"]}
          <geom type="capsule" fromto="0 0 0 0 0 -{UPPER_ARM_M}" size="0.035" mass="1.3"/>
          <body name="{side}_forearm" pos="0 0 -{UPPER_ARM_M}">
            {joints[f"{side}_elbow"]}
            <geom type="capsule" fromto="0 0 0 0 0 -{FOREARM_M}" size="0.03" mass="0.9"/>
            <site name="{side}_hand" pos="0 0 -{FOREARM_M}"/>
          </body>
        </body>"""


def _leg(side: str, sign: int, joints: dict[str, str]) -> str:
    hip = "".join(joints[f"{side}_hip_{axis}"] for axis in ("yaw", "roll", "pitch"))
    ankle = "".join(joints[f"{side}_ankle_{axis}"] for axis in ("pitch", "roll"))
    return f"""
      <body name="{side}_thigh" pos="0 {sign * HIP_M} 0">
        {hip}
        <geom type="capsule" fromto="0 0 0 0 0 -{THIGH_M}" size="0.05" mass="3.2"/>
        <body name="{side}_shank" pos="0 0 -{THIGH_M}">
          {joints[f"{side}_knee"]}
          <geom type="capsule" fromto="0 0 0 0 0 -{SHANK_M}" size="0.04" mass="2"/>
          <body name="{side}_foot" pos="0 0 -{SHANK_M}">
            {ankle}
            <geom class="sole" type="box" size="0.12 0.055 0.015" pos="0.03 0 {0.015 - SOLE_M}"
                  mass="0.8"/>
            <site name="{side}_sole" type="box" size="0.125 0.06 0.02"
                  pos="0.03 0 {0.015 - SOLE_M}"/>
          </body>
        </body>
      </body>"""
