"""What a simulator of a fixed number of envs gives, and the `VecEnv` that is made of it.

A backend implements `Simulator` and gives `RebuiltEnv` a function that builds one. Global env ids, other
counts, keyed seeds, copies, isolation of global random state and lack of memory are dealt with here.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.building import Building
from rallypoint.trainer.envs.isolation import OwnRandomness
from rallypoint.trainer.errors import EnvCapacityError, EnvError, is_out_of_memory
from rallypoint.trainer.rng import Purpose, uniform

Ids = NDArray[np.int64]
Rows = dict[str, NDArray[np.float64]]
Seeds = Callable[[Ids], Ids]
"""A seed in [0, 2**31) for the episode that begins in each of these rows, ``[K] -> [K]``."""

_IDLE_IDS = 2**32 - 1
"""Idle rows have ids downwards from here, for their seeds."""


class Simulator(Protocol):
    """N envs that were built together. It may hand out the same tensors again and again, draw from the
    global generators, and reseed them."""

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, rows: Ids, seeds: Ids) -> Mapping[str, Tensor]:
        """Begin an episode in each of these rows, ``[K]`` ascending; the present observations of all N.
        All rows come in the first call. A simulator that takes one seed for all takes the first."""
        ...

    def step(self, actions: Tensor, seeds: Seeds) -> StepResult:
        """One control step with actions ``[N, A]``, of the dtype asked for, on `EnvSpec.device`.
        Episodes that end begin anew in the same step: the observations are the new ones, and
        ``final_obs`` has the true last ones in the rows that ended (others are not read).
        ``seeds(rows)`` may be asked for."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class CarriedSimulator(Simulator, Protocol):
    """One whose rows can be read out and put into another, with `Capabilities.carry_state`."""

    def rows(self) -> Rows:
        """Copies of all per-env state, ``[N, ...]`` each."""
        ...

    def load_rows(self, rows: Ids, values: Rows) -> Mapping[str, Tensor]:
        """Put such state into these rows; the present observations of all N."""
        ...


@runtime_checkable
class CurriculumSimulator(Simulator, Protocol):
    """One whose tasks change with the steps that have been made."""

    def set_progress(self, steps: int) -> None:
        """Each env of the job has made this many steps. They follow from the iteration, so a simulator
        that is built anew, in whatever process, goes on with the curriculum of the others."""
        ...


@runtime_checkable
class AdaptiveSimulator(Simulator, Protocol):
    """One whose tasks change with what has been learned: see `AdaptiveEnv`. It keeps no curriculum of its
    own, so that any simulator goes on with that of the job."""

    def first_curriculum(self) -> Mapping[str, Tensor]:
        """At the start of a job."""
        ...

    def set_curriculum(self, values: Mapping[str, Tensor]) -> None:
        """Episodes that begin from now on are of these values, which are only read."""
        ...

    def next_curriculum(
        self, values: Mapping[str, Tensor], figures: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        """The values after an iteration with these global figures; a function of its arguments alone."""
        ...


Build = Callable[[int], Simulator]
"""Builds a simulator of this many envs, at least 1."""


class RebuiltEnv:
    """Envs with global ids on simulators of fixed size; implements `rallypoint.trainer.envs.base.VecEnv`.

    With ``resize = "rebuild"`` another count is another simulator: the old one is closed, unless
    several can be held at once, and episodes go on where the simulator can carry them. With
    ``resize = "restart"`` the first one stays, rows that nobody owns are idle, and it never grows.
    """

    def __init__(self, build: Build, request: EnvRequest) -> None:
        """Builds the first simulator, for ``request.num_envs`` envs, or as many as memory holds.
        Raises what ``build`` raises, but for running out of memory with more than one env."""
        self._build = build
        self._request = request
        self._randomness = OwnRandomness(request.seed, request.device)
        self._builds = 0
        self._learned: int | None = None
        self._env_ids: Ids = np.zeros(0, dtype=np.int64)
        self._row_of: Ids = self._env_ids.copy()
        """Row of the simulator of each owned env."""
        self._iteration, self._step = -1, 0
        self._obs: dict[str, Tensor] = {}
        self._simulator: Simulator | None = None
        self._next: Building[Simulator] | None = None
        self._size = 0
        self._make(min(request.num_envs, request.max_envs or request.num_envs))
        self._spec = self._present.spec
        first: Mapping[str, Tensor] = {}
        if isinstance(self._present, AdaptiveSimulator):
            first = self._present.first_curriculum()
        self.curriculum = {name: values.detach().clone() for name, values in first.items()}
        """As `AdaptiveEnv.curriculum`."""

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def env_ids(self) -> Ids:
        return self._env_ids.copy()

    @property
    def builds(self) -> int:
        return self._builds

    @property
    def capacity_envs(self) -> int | None:
        """The least of what was asked for, what memory held, and, where the process would have to be
        started again for more, what was built."""
        bounds = [self._request.max_envs, self._learned]
        if self._spec.capabilities.resize == "restart":
            bounds.append(self._size)
        return min((b for b in bounds if b is not None), default=None)

    def assign(self, env_ids: Ids, *, iteration: int) -> Ids:
        """As `VecEnv.assign`; raises `EnvError` when an id occurs twice."""
        wanted = np.sort(np.asarray(env_ids, dtype=np.int64))
        if (wanted[1:] == wanted[:-1]).any():
            raise EnvError(f"env ids {wanted[1:][wanted[1:] == wanted[:-1]]} are assigned twice")
        self._check_capacity(wanted.size)
        carried: tuple[Ids, Rows] | None = None
        if wanted.size not in (0, self._size) and self._spec.capabilities.resize == "rebuild":
            carried = self._replace(wanted.size)
        return self._place(wanted, iteration, carried)

    def prepare(self, count: int) -> bool:
        """As `PreparedEnv.prepare`; with `Capabilities.multi_instance` alone there is something to do."""
        can = self._spec.capabilities
        if can.resize != "rebuild" or not can.multi_instance or count in (0, self._size):
            return True
        if self._next is None or self._next.count != count:
            self._drop_next()
            self._next = Building(self._build, count)
        return self._next.done

    def begin_rollout(self, iteration: int) -> dict[str, Tensor]:
        self._iteration, self._step = iteration, 0
        self._tell_progress(iteration)
        return self._picked(self._obs)

    def advance(self, figures: Mapping[str, float]) -> None:
        """As `AdaptiveEnv.advance`."""
        if isinstance(self._present, AdaptiveSimulator):
            for name, values in self._present.next_curriculum(self.curriculum, figures).items():
                self.curriculum[name].copy_(values)

    def step(self, actions: Tensor) -> StepResult:
        """As `VecEnv.step`. Raises `EnvError` for actions of another shape, before `begin_rollout`, and
        when the simulator breaks its contract."""
        self._check_step(actions)
        device = self._spec.device
        every = torch.zeros(
            self._size, self._spec.action_dim, dtype=self._request.dtype, device=device
        )
        every[self._index()] = actions.detach().to(every)
        with self._randomness.entered():
            result = self._present.step(every, self._reset_seeds)
        self._step += 1
        self._obs = self._checked(result.obs, "obs")
        if self._spec.capabilities.final_obs and result.final_obs is None:
            raise EnvError(
                f"{self._spec.task}: declares final_obs, but a step came without final observations"
            )
        return StepResult(
            obs=self._picked(self._obs),
            reward=self._pick(self._flat("reward", result.reward)).to(self._request.dtype),
            terminated=self._pick(self._flat("terminated", result.terminated)),
            truncated=self._pick(
                self._flat("truncated", result.truncated) & ~result.terminated.to(torch.bool)
            ),
            figures={k: self._pick(self._flat(k, v)).double() for k, v in result.figures.items()},
            reward_terms={
                k: self._pick(self._flat(k, v)).double() for k, v in result.reward_terms.items()
            },
            endings={k: self._pick(self._flat(k, v)).double() for k, v in result.endings.items()},
            final_obs=(
                None
                if result.final_obs is None
                else self._picked(self._checked(result.final_obs, "final_obs"))
            ),
            bins=None if result.bins is None else self._pick(self._flat("bins", result.bins)),
        )

    def rows(self) -> Rows:
        """State of owned envs, where it can be carried; else nothing."""
        simulator = self._present
        if not isinstance(simulator, CarriedSimulator) or not self._spec.capabilities.carry_state:
            return {}
        return {name: values[self._row_of] for name, values in simulator.rows().items()}

    def load_rows(self, env_ids: Ids, rows: Mapping[str, NDArray[np.float64]]) -> None:
        """As `VecEnv.load_rows`. Raises `EnvError` when an env is not owned, or rows are given to a
        simulator that carries none."""
        foreign = np.setdiff1d(env_ids, self._env_ids)
        if foreign.size:
            raise EnvError(f"{self._spec.task}: rows given for envs {foreign}, which are not owned")
        if not rows or not env_ids.size:
            return
        simulator = self._present
        if not isinstance(simulator, CarriedSimulator):
            raise EnvError(f"{self._spec.task}: rows given, but this backend carries no state")
        where = self._row_of[np.searchsorted(self._env_ids, env_ids)]
        order = np.argsort(where)
        values = {name: np.asarray(v)[order] for name, v in rows.items()}
        with self._randomness.entered():
            obs = simulator.load_rows(where[order], values)
        self._obs = self._checked(obs, "obs")

    def close(self) -> None:
        self._drop_next()
        self._close_present()

    def _close_present(self) -> None:
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            with self._randomness.entered():
                simulator.close()

    # --- building -----------------------------------------------------------------------------------

    @property
    def _present(self) -> Simulator:
        if self._simulator is None:
            raise EnvError("this env is closed")
        return self._simulator

    def _drop_next(self) -> None:
        building, self._next = self._next, None
        if building is not None:
            building.drop()

    def _set(self, simulator: Simulator, count: int) -> None:
        self._simulator, self._size = simulator, count
        self._builds += 1
        self._obs = {}

    def _make(self, count: int) -> None:
        """Build for this many, or for the most that memory holds, which is learned."""
        while True:
            try:
                with self._randomness.entered():
                    built = self._build(count)
            except Exception as error:  # whatever it is goes on, but for a lack of memory
                if not is_out_of_memory(error) or count == 1:
                    raise
                worked = self._size if self._size < count else 0
                self._learned = count = max(count // 2, worked)
                continue
            self._set(built, count)
            return

    def _check_capacity(self, count: int) -> None:
        capacity = self.capacity_envs
        if capacity is not None and count > capacity:
            raise EnvCapacityError(
                f"{self._spec.task}: {count} envs are asked for, and this process can hold {capacity}",
                capacity,
            )

    def _replace(self, count: int) -> tuple[Ids, Rows]:
        """Build anew; who was owned, with the rows that can be carried."""
        carried = self._env_ids, self.rows()
        ready, self._next = self._next, None
        prepared = None
        if ready is not None and ready.count == count:
            prepared = ready.take()
        elif ready is not None:
            ready.drop()
        self._close_present()
        if prepared is None:
            self._make(count)
        else:
            self._set(prepared, count)
        self._env_ids = self._row_of = np.zeros(0, dtype=np.int64)
        if self._size < count:
            self._place(carried[0][: self._size], self._iteration + 1, carried)
            self._check_capacity(count)
        return carried

    # --- who is in which row ------------------------------------------------------------------------

    def _place(self, wanted: Ids, iteration: int, carried: tuple[Ids, Rows] | None) -> Ids:
        """Give each of these envs a row; those that begin an episode."""
        _, now, before = np.intersect1d(wanted, self._env_ids, return_indices=True)
        rows = np.full(wanted.size, -1, dtype=np.int64)
        rows[now] = self._row_of[before]
        free = np.setdiff1d(np.arange(self._size), rows)
        fresh = rows < 0
        rows[fresh] = free[: int(fresh.sum())]
        self._env_ids, self._row_of = wanted, rows
        begin = wanted[fresh]
        first = not self._obs  # of this simulator: idle rows begin too
        where = np.arange(self._size) if first else np.sort(rows[fresh])
        if where.size:
            self._tell_progress(iteration)
            seeds = self._seeds(Purpose.ENV_ASSIGN, where, iteration, 0)
            with self._randomness.entered():
                self._obs = self._checked(self._present.reset(where, seeds), "obs")
        if carried is None or not carried[1]:
            return begin
        stay, _, where = np.intersect1d(begin, carried[0], return_indices=True)
        self.load_rows(stay, {name: values[where] for name, values in carried[1].items()})
        return np.setdiff1d(begin, stay)

    def _tell_progress(self, iteration: int) -> None:
        """Before the rollout of this iteration, or the start of episodes for it."""
        if isinstance(self._present, CurriculumSimulator):
            self._present.set_progress(max(0, iteration - 1) * self._request.rollout_steps)
        if isinstance(self._present, AdaptiveSimulator):
            self._present.set_curriculum(self.curriculum)

    def _reset_seeds(self, rows: Ids) -> Ids:
        return self._seeds(Purpose.ENV_RESET, rows, self._iteration, self._step)

    def _seeds(self, purpose: Purpose, rows: Ids, iteration: int, step: int) -> Ids:
        ids = _IDLE_IDS - np.arange(self._size)
        ids[self._row_of] = self._env_ids
        draws = uniform(self._request.seed, purpose, ids[rows], iteration, step, 1)[:, 0]
        return np.floor(draws * 2**31).astype(np.int64)

    # --- tensors ------------------------------------------------------------------------------------

    def _index(self) -> Tensor:
        return torch.from_numpy(self._row_of).to(self._spec.device)

    def _pick(self, values: Tensor) -> Tensor:
        """Rows of owned envs, in tensors of their own."""
        return values.index_select(0, self._index())

    def _picked(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {group: self._pick(values) for group, values in obs.items()}

    def _checked(self, obs: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """The groups of the spec, copied, in the dtype asked for. Raises `EnvError`."""
        spec = self._present.spec
        expected = {group: (self._size, dim) for group, dim in spec.obs_dims.items()}
        found = {group: tuple(obs[group].shape) for group in expected if group in obs}
        if found != expected:
            raise EnvError(f"{spec.task}: {what} should be {expected}, and is {found}")
        return {g: obs[g].detach().to(self._request.dtype, copy=True) for g in expected}

    def _flat(self, name: str, values: Tensor) -> Tensor:
        if values.shape != (self._size,):
            raise EnvError(
                f"{self._spec.task}: {name} should have shape ({self._size},), and has "
                f"{tuple(values.shape)}"
            )
        return values.detach()

    def _check_step(self, actions: Tensor) -> None:
        expected = (self._env_ids.size, self._spec.action_dim)
        if tuple(actions.shape) != expected:
            raise EnvError(
                f"{self._spec.task}: actions have shape {tuple(actions.shape)}, expected {expected} "
                "(owned envs, action_dim)"
            )
        if self._iteration < 0:
            raise EnvError(f"{self._spec.task}: step() before the first begin_rollout()")
        finite = actions.isfinite().all(dim=1).cpu().numpy()
        if not finite.all():
            raise EnvError(
                f"{self._spec.task}: actions of envs {self._env_ids[~finite]} are not finite"
            )
