"""The reference motions of ``humanoid-track`` by frame, all clips in a row, and their bins."""

import functools
from dataclasses import dataclass
from typing import Any, Final

import mujoco
import numpy as np
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import MotionLibrary
from rallypoint.trainer.envs.embedded import Array
from rallypoint.trainer.envs.humanoid_model import END_EFFECTORS, mjcf
from rallypoint.trainer.envs.motions import CLIPS, FPS, clip_qpos
from rallypoint.trainer.envs.mujoco_env import body_axes

BIN_FRAMES: Final = 50
"""Frames of a bin; a clip's last one has what is left."""


def _bins(frames: int) -> tuple[int, ...]:
    whole, rest = divmod(frames, BIN_FRAMES)
    return (BIN_FRAMES,) * whole + ((rest,) if rest else ())


LIBRARY: Final = MotionLibrary(
    clips=tuple(clip.name for clip in CLIPS),
    bin_frames=tuple(_bins(clip.frames) for clip in CLIPS),
)


@dataclass(frozen=True)
class Reference:
    """Arrays over all F frames of all C clips and their B bins; read only."""

    qpos: Array
    """``[F, 7 + joints]``: metres, quaternion, radians."""
    qvel: Array
    """``[F, 6 + joints]``, as MuJoCo has it (root rotation in its own frame)."""
    end_effectors: Array
    """Positions relative to the root, axes of the world, metres ``[F, 3 K]``."""
    axes: Array
    """Forward and up of the root in the world, ``[F, 6]``."""
    up: Array
    """Up alone, ``[F, 3]``."""
    progress: Array
    """Part of the clip that is behind a frame, ``[F]``."""
    stand: Array
    """Joint angles of standing."""
    bin_of_frame: NDArray[np.int64]
    last_of_frame: NDArray[np.int64]
    """Last frame of a frame's clip, ``[F]``."""
    first: NDArray[np.int64]
    """First frame of each clip, ``[C]``."""
    last: NDArray[np.int64]
    """Last frame of each clip, ``[C]``."""
    bin_first: NDArray[np.int64]
    bin_frames: NDArray[np.int64]
    clip_of_bin: NDArray[np.int64]


@functools.cache
def reference() -> Reference:
    """The whole library, made on the first call in a process."""
    model: Any = mujoco.MjModel.from_xml_string(mjcf())
    poses = [clip_qpos(clip) for clip in CLIPS]
    qpos = np.concatenate(poses)
    forward, _, up = body_axes(qpos[:, 3:7])
    frames = np.array([clip.frames for clip in CLIPS])
    last = np.cumsum(frames) - 1
    bin_frames = np.array(LIBRARY.lengths)
    values = {
        "qpos": qpos,
        "qvel": np.concatenate([_velocities(model, pose) for pose in poses]),
        "end_effectors": _end_effectors(model, qpos),
        "axes": np.stack([*forward, *up], axis=1),
        "up": np.stack(up, axis=1),
        "progress": np.concatenate([np.arange(n) / n for n in frames]),
        "stand": qpos[0, 7:].copy(),
        "bin_of_frame": np.repeat(np.arange(len(bin_frames)), bin_frames),
        "last_of_frame": np.repeat(last, frames),
        "first": last - frames + 1,
        "last": last,
        "bin_first": np.cumsum(bin_frames) - bin_frames,
        "bin_frames": bin_frames,
        "clip_of_bin": np.array(LIBRARY.clip_of_bin),
    }
    for array in values.values():
        array.flags.writeable = False
    return Reference(**values)


def _velocities(model: Any, qpos: Array) -> Array:
    """Central differences of one clip, ``[F, nv]``; one-sided at its ends."""
    velocity = np.zeros((len(qpos), model.nv))
    for k in range(len(qpos)):
        before, after = max(k - 1, 0), min(k + 1, len(qpos) - 1)
        seconds = (after - before) / FPS
        mujoco.mj_differentiatePos(model, velocity[k], seconds, qpos[before], qpos[after])
    return velocity


def _end_effectors(model: Any, qpos: Array) -> Array:
    data: Any = mujoco.MjData(model)
    sites = [model.site(name).id for name in END_EFFECTORS]
    positions = np.zeros((len(qpos), 3 * len(sites)))
    for row, pose in zip(positions, qpos, strict=True):
        data.qpos[:] = pose
        mujoco.mj_kinematics(model, data)
        row[:] = (data.site_xpos[sites] - pose[:3]).ravel()
    return positions
