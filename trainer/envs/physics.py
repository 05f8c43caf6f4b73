"""MuJoCo physics of N independent simulations of one model, behind two interchangeable engines.

`BatchPhysics` uses ``mujoco.batch`` (MuJoCo 3.17 and later); `PoolPhysics` steps one `MjData` per
thread over the same state rows and works with every version we allow. Both give bit-identical
results for any number of simulations and threads, because a state row is the whole of what a
simulation carries from step to step (``mjSTATE_INTEGRATION``: the solver's warm start is in it).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

try:
    from mujoco.batch import Batch
except ImportError:  # MuJoCo before 3.17
    Batch = None

_ROW: Final = mujoco.mjtState.mjSTATE_INTEGRATION


class Physics(Protocol):
    """N simulations of one model."""

    @property
    def state(self) -> NDArray[np.float64]:
        """State rows, ``[N, S]``: live, writes count from the next step on."""
        ...

    @property
    def sensors(self) -> NDArray[np.float64]:
        """Sensor values after the last `step`, ``[N, R]``; as everywhere in MuJoCo they lag the
        state by one substep. Not part of the state."""
        ...

    def step(self, substeps: int) -> None:
        """Advance every simulation by ``substeps`` time steps of the model."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


def make_physics(model: Any, count: int, *, threads: int = 1) -> Physics:
    """``count`` simulations (0 is allowed) of an ``MjModel``, all in its default state, on
    ``threads`` threads, with the fastest engine this MuJoCo has."""
    return (PoolPhysics if Batch is None else BatchPhysics)(model, count, threads=threads)


def state_slice(model: Any, component: int) -> slice:
    """Columns of one ``mjtState`` component (one bit) in a state row."""
    below = int(_ROW) & (int(component) - 1)
    start = mujoco.mj_stateSize(model, below)
    return slice(start, start + mujoco.mj_stateSize(model, int(component)))


def default_row(model: Any) -> NDArray[np.float64]:
    """State row of a fresh ``MjData``, ``[S]``."""
    row = np.zeros(mujoco.mj_stateSize(model, _ROW))
    mujoco.mj_getState(model, mujoco.MjData(model), row, _ROW)
    return row


class BatchPhysics:
    """The engine of ``mujoco.batch``. Implements `Physics`."""

    def __init__(self, model: Any, count: int, *, threads: int = 1) -> None:
        # A Batch of no simulations is refused, so there is none then.
        self._batch = Batch(model, count, threads) if count else None
        if self._batch is None:
            self._state = np.zeros((0, mujoco.mj_stateSize(model, _ROW)))
            self._sensors = np.zeros((0, model.nsensordata))
        else:
            self._state = self._batch.state
            self._state[:] = default_row(model)
            self._sensors = self._batch.bind("sensordata")

    @property
    def state(self) -> NDArray[np.float64]:
        return self._state

    @property
    def sensors(self) -> NDArray[np.float64]:
        return self._sensors

    def step(self, substeps: int) -> None:
        if self._batch is not None:
            self._batch.step(nstep=substeps)

    def close(self) -> None:
        self._batch = None


class PoolPhysics:
    """One `MjData` per thread that all rows of its share pass through. Implements `Physics`."""

    def __init__(self, model: Any, count: int, *, threads: int = 1) -> None:
        self._model = model
        self._state = np.tile(default_row(model), (count, 1))
        self._sensors = np.zeros((count, model.nsensordata))
        shares = np.array_split(np.arange(count), max(1, min(threads, count)))
        self._shares = [(mujoco.MjData(model), share) for share in shares]
        # The calling thread takes the first share itself.
        self._pool = ThreadPoolExecutor(len(shares) - 1) if len(shares) > 1 else None

    @property
    def state(self) -> NDArray[np.float64]:
        return self._state

    @property
    def sensors(self) -> NDArray[np.float64]:
        return self._sensors

    def step(self, substeps: int) -> None:
        (data, share), *others = self._shares
        futures = (
            [self._pool.submit(self._step_share, *other, substeps) for other in others]
            if self._pool is not None
            else []
        )
        self._step_share(data, share, substeps)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _step_share(self, data: Any, share: NDArray[np.int64], substeps: int) -> None:
        for i in share:
            mujoco.mj_setState(self._model, data, self._state[i], _ROW)
            mujoco.mj_step(self._model, data, nstep=substeps)  # releases the GIL
            mujoco.mj_getState(self._model, data, self._state[i], _ROW)
            self._sensors[i] = data.sensordata
