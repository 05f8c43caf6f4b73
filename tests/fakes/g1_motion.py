"""A motion of the G1 for mjlab's tracking task, made of kinematics: a squat, with the arms swinging.

``python -m tests.fakes.g1_motion FILE`` writes it; needs mjlab.
"""

import importlib
import sys
from pathlib import Path
from typing import Any, Final

import mujoco
import numpy as np
from numpy.typing import NDArray

TASK: Final = "Mjlab-Tracking-Flat-Unitree-G1"
FPS: Final = 50
SECONDS: Final = 4
_SWINGS: Final = {
    "hip_pitch": -0.4,
    "knee": 0.8,
    "ankle_pitch": -0.4,
    "left_shoulder_pitch": 0.4,
    "right_shoulder_pitch": -0.4,
}
"""Part of a joint's name -> how far it goes from its rest, rad."""
_DOWN_M: Final = 0.06

Array = NDArray[np.float64]


def write(path: Path) -> Path:
    """Write the motion as mjlab reads it; returns ``path``."""
    importlib.import_module("mjlab.tasks")
    cfg = importlib.import_module("mjlab.tasks.registry").load_env_cfg(TASK)
    cfg.scene.num_envs = 1
    scene = importlib.import_module("mjlab.scene").Scene(cfg.scene, device="cpu")
    model: Any = scene.compile()
    positions = _positions(model)
    velocities = np.zeros((len(positions), model.nv))
    for k in range(1, len(positions) - 1):
        mujoco.mj_differentiatePos(
            model, velocities[k], 2 / FPS, positions[k - 1], positions[k + 1]
        )
    bodies = _bodies(model, positions, velocities)
    np.savez(
        path,
        fps=np.array([FPS]),
        joint_pos=positions[:, 7:].astype(np.float32),
        joint_vel=velocities[:, 6:].astype(np.float32),
        body_pos_w=bodies["body_pos_w"].astype(np.float32),
        body_quat_w=bodies["body_quat_w"].astype(np.float32),
        body_lin_vel_w=bodies["body_lin_vel_w"].astype(np.float32),
        body_ang_vel_w=bodies["body_ang_vel_w"].astype(np.float32),
    )
    return path


def _positions(model: Any) -> Array:
    rest = model.key_qpos[0] if model.nkey else model.qpos0
    phase = 2 * np.pi * 0.5 * np.arange(FPS * SECONDS) / FPS
    swing = 0.5 * (1 - np.cos(phase))
    positions = np.tile(rest, (FPS * SECONDS, 1))
    positions[:, 2] -= _DOWN_M * swing
    for joint in range(model.njnt):
        for part, angle in _SWINGS.items():
            if part in model.joint(joint).name:
                positions[:, model.jnt_qposadr[joint]] += angle * swing
    return positions


def _bodies(model: Any, positions: Array, velocities: Array) -> dict[str, Array]:
    """Pose and velocity of each body of the robot in the world, frame by frame."""
    data: Any = mujoco.MjData(model)
    robot = [b for b in range(1, model.nbody) if model.body(b).name.startswith("robot/")]
    frames: dict[str, list[Array]] = {
        name: [] for name in ("body_pos_w", "body_quat_w", "body_lin_vel_w", "body_ang_vel_w")
    }
    for position, velocity in zip(positions, velocities, strict=True):
        data.qpos[:], data.qvel[:] = position, velocity
        mujoco.mj_forward(model, data)
        spatial = np.zeros((len(robot), 6))
        for row, body in zip(spatial, robot, strict=True):
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, row, 0)
        frames["body_pos_w"].append(data.xpos[robot].copy())
        frames["body_quat_w"].append(data.xquat[robot].copy())
        frames["body_lin_vel_w"].append(spatial[:, 3:])
        frames["body_ang_vel_w"].append(spatial[:, :3])
    return {name: np.stack(values) for name, values in frames.items()}


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
