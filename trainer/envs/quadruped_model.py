"""The MJCF of a generic 12-joint quadruped of about 12 kg, made of primitives; no asset files."""

from typing import Final

import numpy as np

THIGH_M: Final = 0.2
CALF_M: Final = 0.2
FOOT_RADIUS_M: Final = 0.022
STAND_HEIGHT_M: Final = 0.32
"""Height of the base where episodes start: just above standing."""
STIFFNESS_N_M_RAD: Final = 30.0
DAMPING_N_M_S_RAD: Final = 0.8

LEGS: Final = (("FL", 1, 1), ("FR", 1, -1), ("RL", -1, 1), ("RR", -1, -1))
"""Name, sign of x (front +), sign of y (left +); joints and sensors are in this order, each leg
hip, thigh, calf."""

JOINT_NAMES: Final = tuple(
    f"{leg}_{joint}" for leg, _, _ in LEGS for joint in ("hip", "thigh", "calf")
)

DEFAULT_POSE_RAD: Final = np.array(
    [angle for _, _, side in LEGS for angle in (0.1 * side, 0.75, -1.5)]
)
"""Joint angles of standing, feet under the hips; actions are offsets from it."""


def mjcf() -> str:
    """The model: position actuators in joint order, one touch sensor per foot in leg order."""
    legs = "".join(_leg(name, front, side) for name, front, side in LEGS)
    actuators = "".join(
        f'<position joint="{leg}_{joint}" kp="{STIFFNESS_N_M_RAD}" kv="{DAMPING_N_M_S_RAD}" '
        f'forcerange="-{limit} {limit}"/>'
        for leg, _, _ in LEGS
        for joint, limit in (("hip", 25), ("thigh", 25), ("calf", 40))
    )
    sensors = "".join(f'<touch site="{leg}_foot"/>' for leg, _, _ in LEGS)
    # Robot geoms have contype 0 and the floor conaffinity 0: only robot against floor collides.
    return f"""
<mujoco model="quadruped">
  <compiler angle="radian"/>
  <option timestep="0.005" integrator="implicitfast" iterations="10" ls_iterations="20"/>
  <default>
    <joint armature="0.01" damping="0.05"/>
    <geom contype="0" conaffinity="0"/>
    <default class="contact"><geom contype="0" conaffinity="1"/></default>
  </default>
  <worldbody>
    <geom type="plane" size="0 0 1" contype="1"/>
    <body name="base" pos="0 0 {STAND_HEIGHT_M}">
      <freejoint/>
      <inertial pos="0 0 0" mass="6.5" diaginertia="0.03 0.09 0.1"/>
      <geom class="contact" type="box" size="0.19 0.05 0.055"/>{legs}
    </body>
  </worldbody>
  <actuator>{actuators}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>
"""


def _leg(name: str, front: int, side: int) -> str:
    return f"""
      <body name="{name}_hip" pos="{0.19 * front} {0.05 * side} 0">
        <inertial pos="0 0 0" mass="0.6" diaginertia="0.0006 0.0009 0.0006"/>
        <joint name="{name}_hip" axis="1 0 0" range="-0.9 0.9"/>
        <body name="{name}_thigh" pos="0 {0.09 * side} 0">
          <inertial pos="0 0 -0.03" mass="1.0" diaginertia="0.005 0.005 0.001"/>
          <joint name="{name}_thigh" axis="0 1 0" range="-1.2 3.0"/>
          <geom type="capsule" fromto="0 0 0 0 0 -{THIGH_M}" size="0.02"/>
          <body name="{name}_calf" pos="0 0 -{THIGH_M}">
            <inertial pos="0 0 -0.1" mass="0.2" diaginertia="0.002 0.002 0.00005"/>
            <joint name="{name}_calf" axis="0 1 0" range="-2.7 -0.8"/>
            <geom type="capsule" fromto="0 0 0 0 0 -{CALF_M}" size="0.012"/>
            <geom class="contact" type="sphere" pos="0 0 -{CALF_M}" size="{FOOT_RADIUS_M}"/>
            <site name="{name}_foot" pos="0 0 -{CALF_M}" size="{1.3 * FOOT_RADIUS_M:.4f}"/>
          </body>
        </body>
      </body>"""
