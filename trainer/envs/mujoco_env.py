"""What embedded MuJoCo tasks share: the model, the physics engine and views of its state rows."""

from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.base import EnvSpec, Scene
from rallypoint.trainer.envs.embedded import Array, EmbeddedEnv
from rallypoint.trainer.envs.physics import Physics, default_row, make_physics, state_slice


class MujocoEnv(EmbeddedEnv):
    """An embedded env whose dynamics are MuJoCo's. The model is compiled once, in the constructor;
    a resize only re-arranges state rows.
    """

    view_distance_m = 3.0
    """From which the task is looked at."""

    def __init__(self, spec: EnvSpec, mjcf: str, *, seed: int, dtype: torch.dtype) -> None:
        self._mjcf = mjcf
        self._model: Any = mujoco.MjModel.from_xml_string(mjcf)
        self._substeps = round(spec.step_dt_s / self._model.opt.timestep)
        self._default_row = default_row(self._model)
        self._columns = {
            name: state_slice(self._model, component)
            for name, component in (
                ("time", mujoco.mjtState.mjSTATE_TIME),
                ("qpos", mujoco.mjtState.mjSTATE_QPOS),
                ("qvel", mujoco.mjtState.mjSTATE_QVEL),
                ("ctrl", mujoco.mjtState.mjSTATE_CTRL),
            )
        }
        self._physics: Physics = make_physics(self._model, 0)
        super().__init__(spec, seed=seed, dtype=dtype)

    def _allocate(self, count: int) -> dict[str, Array]:
        self.close()
        self._physics = make_physics(self._model, count)
        return {"physics": self._physics.state}

    @property
    def scene(self) -> Scene:
        """The model itself; what floats is followed."""
        floats = self._model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        return Scene(self._mjcf, self.view_distance_m, bool(floats))

    def positions(self) -> Array:
        """Generalised positions, ``[N, nq]``, fresh."""
        return self._view("qpos").copy()

    def close(self) -> None:
        """Release the physics engine."""
        self._physics.close()

    def _simulate(self, controls: Array) -> tuple[Array, NDArray[np.bool_]]:
        """One control step of every env with actuator targets ``[N, nu]``: the sensors ``[N, R]``, and
        which simulations diverged. MuJoCo puts those back to the default state; their episode must
        be terminated."""
        time_s = self._view("time")[:, 0]
        due_s = time_s + 0.5 * self._spec.step_dt_s
        self._view("ctrl")[:] = controls
        self._physics.step(self._substeps)
        return self._physics.sensors, time_s < due_s  # a reset starts the clock anew

    def _reset_physics(self, rows: NDArray[np.int64]) -> None:
        """Put these rows into the model's default state, warm start included."""
        self._state["physics"][rows] = self._default_row

    def _view(self, name: str) -> Array:
        """Live view of time, qpos, qvel or ctrl of all envs."""
        return self._state["physics"][:, self._columns[name]]


def body_axes(quaternion: Array) -> tuple[tuple[Array, Array, Array], ...]:
    """Forward, left and up of a body in the world, ``[N]`` per coordinate: the columns of the
    rotation of ``quaternion`` ``[N, 4]`` (w x y z). A vector's product with one is its coordinate
    in the body's frame."""
    w, x, y, z = quaternion.T
    forward = (1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y))
    left = (2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x))
    up = (2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y))
    return forward, left, up
