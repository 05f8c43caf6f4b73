"""Which envs this worker has, at which safe point their rows stand, and what moves with an env.

Rows are everything that is kept per env: the simulator's state, the running sums of its episode. Rows
go on from one iteration to the next only if they stand exactly at the safe point between them. Others
(of a rollout that was dropped, or of envs that are new here) are taken from the node's backup, where
there is one (``env.backup``), else the envs begin new episodes: they are *cut*.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.elastic.registry import Scope, StateRegistry
from rallypoint.trainer.elastic.rowsfile import Rows, RowsFiles
from rallypoint.trainer.elastic.rowsmove import Keep, exchange
from rallypoint.trainer.envs.base import AdaptiveEnv, VecEnv
from rallypoint.trainer.errors import EnvCapacityError, EnvError

EnvIds = NDArray[np.int64]


@dataclass(frozen=True)
class SafePoint:
    """After this iteration of this lineage; it begins the next one."""

    lineage: str
    iteration: int


class EnvRows:
    """The envs of one worker. The main thread uses it."""

    def __init__(
        self,
        env: VecEnv,
        registry: StateRegistry,
        on_assign: Callable[[EnvIds], None],
        block: int,
        backup: RowsFiles | None,
    ) -> None:
        """``on_assign(ids)`` is told, after the env, of every change. Raises `EnvError` when there is
        a backup and the env cannot carry state."""
        if backup is not None and not env.spec.capabilities.carry_state:
            raise EnvError(
                f'env.backup = "node" needs an env whose rows can be read out and put back, which task '
                f'{env.spec.task!r} of this backend cannot; take env.backup = "none"'
            )
        self._env = env
        self._registry = registry
        self._on_assign = on_assign
        self._block = block
        self._backup = backup
        self._stands_at: SafePoint | None = None

    def hold(self, blocks: tuple[int, ...], at: SafePoint) -> tuple[int, ...]:
        """Own exactly these env blocks, with their rows of this safe point. The blocks that were cut."""
        if self._stands_at != at:
            self._assign((), at)
        begun = self._assign(blocks, at)
        new = tuple(b for b in blocks if begun[(begun // self._block) == b].size)
        self._stands_at = None  # a rollout begins
        if self._backup is None or not new:
            return new
        ids, rows = self._backup.find(at.lineage, at.iteration, env_ids(new, self._block))
        if ids.size:
            self._registry.write_rows(ids, rows)
        return tuple(b for b in new if b * self._block not in ids)

    def fetch(
        self, collectives: Collectives, blocks: tuple[int, ...], at: SafePoint, every: int
    ) -> None:
        """Bring rows of these blocks, which `hold` will be asked for, from other nodes; all ranks do so
        together. ``every`` is the number of env blocks of the job."""
        if self._backup is not None:
            stand = self._env.env_ids if self._stands_at == at else ()
            wanted = [b for b in blocks if b * self._block not in stand]
            self._exchange(collectives, at, wanted, self._backup.receive, every)

    def gather(self, collectives: Collectives, at: SafePoint, every: int, *, keeps: bool) -> None:
        """Bring the rows of all envs at this safe point to the node of the rank that ``keeps`` them; all
        ranks do so together. What no node has (an env that is cut) is left out."""
        if self._backup is not None:
            wanted = range(every) if keeps else ()
            self._exchange(collectives, at, wanted, self._backup.gather, every)

    def _exchange(
        self,
        collectives: Collectives,
        at: SafePoint,
        wanted: Collection[int],
        keep: Keep,
        every: int,
    ) -> None:
        if self._backup is not None:
            exchange(
                *(collectives, self._backup, at.lineage, at.iteration, wanted, keep),
                blocks=every,
                size=self._block,
            )

    def stand(self, at: SafePoint) -> None:
        """The rollout is complete, with all envs that are owned: their rows are those of this safe
        point, should its iteration be committed. They go to the backup before it can be."""
        self._stands_at = at
        if self._backup is not None:
            rows = self._registry.read_rows()
            self._backup.save(at.lineage, at.iteration, self._env.env_ids, rows)

    def forget(self) -> None:
        """The rollout that brought the rows where they are was dropped."""
        self._stands_at = None

    def set_aside(self) -> tuple[EnvIds, Rows]:
        """Take all rows out, so that others can be held meanwhile."""
        kept = self._env.env_ids, self._registry.read_rows()
        self._stands_at = None
        return kept

    def bring_back(self, kept: tuple[EnvIds, Rows], at: SafePoint) -> None:
        """Own those that were set aside again, beside the present ones."""
        ids, rows = kept
        present, present_rows = self._env.env_ids, self._registry.read_rows()
        both = np.sort(np.concatenate([ids, present]))
        self._env.assign(both, iteration=at.iteration)
        self._on_assign(both)
        self._registry.write_rows(ids, rows)
        self._registry.write_rows(present, present_rows)

    def owns(self, blocks: tuple[int, ...], at: SafePoint) -> bool:
        """Whether `hold` has nothing to do."""
        ids = env_ids(blocks, self._block)
        return self._stands_at == at and np.array_equal(ids, self._env.env_ids)

    def _assign(self, blocks: tuple[int, ...], at: SafePoint) -> EnvIds:
        """Those that begin an episode, be it that a simulator was built anew: their sums begin too."""
        ids = env_ids(blocks, self._block)
        if np.array_equal(ids, self._env.env_ids):
            return ids[:0]
        try:
            begun = self._env.assign(ids, iteration=at.iteration + 1)
        except EnvCapacityError:
            self._stands_at = None  # what is owned may have begun anew
            raise
        self._on_assign(np.setdiff1d(ids, begun))
        self._on_assign(ids)
        return begun


def env_ids(blocks: tuple[int, ...], size: int) -> EnvIds:
    """Global env ids of these blocks, ascending."""
    starts = np.array(sorted(blocks), dtype=np.int64) * size
    return (starts[:, None] + np.arange(size)).reshape(-1)


def register_env(registry: StateRegistry, env: VecEnv) -> None:
    """All state of an env: its rows, and its curriculum where it has one."""
    register_curriculum(registry, env)
    registry.register_rows(
        "env", functools.partial(rows_of_env, env), functools.partial(load_rows_of_env, env)
    )


def register_curriculum(registry: StateRegistry, env: VecEnv) -> None:
    """The curriculum of an env is state of the job, where it has one."""
    if isinstance(env, AdaptiveEnv) and env.curriculum:
        registry.register("curriculum", Scope.GLOBAL, lambda: env.curriculum)


def rows_of_env(env: VecEnv) -> Rows:
    """All per-env state of an env, as tensors."""
    return {name: torch.from_numpy(values) for name, values in env.rows().items()}


def load_rows_of_env(env: VecEnv, ids: EnvIds, rows: Rows) -> None:
    """Put what `rows_of_env` gave into these envs."""
    env.load_rows(ids, {name: tensor.numpy() for name, tensor in rows.items()})
