"""Levels of a generated terrain, which Isaac Lab and mjlab keep per env, as a curriculum of the job.

A terrain has rows of rising difficulty; a term of the task moves an env a row up or down as its episodes
end. The job keeps how its env steps were spread over the rows. Episodes that the trainer begins are on levels
drawn from these shares, so that the spread stays, and not the mean alone.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.rng import Purpose, uniform

CURRICULUM: Final = "terrain_levels"
"""Share of the env steps on each level, float64 ``[L]``; all 0 until an iteration has been made."""


class Levels:
    """Those of one simulation. The task's term moves no env whose episode it does not see whole: one that was
    cut, or that began with a part of its time used up."""

    def __init__(self, terrain: Any) -> None:
        self._terrain = terrain
        self.count = int(terrain.terrain_origins.shape[0])
        self.shares: Tensor | None = None
        """The job's, live; None: not known yet."""
        self._partial = torch.ones_like(terrain.terrain_levels, dtype=torch.bool)
        self._move = terrain.update_env_origins
        terrain.update_env_origins = self._move_whole

    def release(self) -> None:
        """Leave the terrain to itself."""
        del self._terrain.update_env_origins
        del self._terrain, self._move

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        """Before the trainer begins episodes in these rows ``[K]``: their levels are drawn. What levels they had
        need not be the job's: of a warm-up, or of rows that had no env."""
        where = torch.from_numpy(rows).to(self._partial.device)
        self._partial[where] = True
        if self.shares is None or not self.shares.any():
            return
        up_to = np.cumsum(self.shares.cpu().numpy())
        draws = uniform(0, Purpose.TERRAIN_LEVEL, seeds, 0, 0, 1)[:, 0]
        drawn = torch.from_numpy(np.searchsorted(up_to / up_to[-1], draws, side="right"))
        levels = self._terrain.terrain_levels
        levels[where] = drawn.to(levels)
        stay = torch.zeros_like(where, dtype=torch.bool)
        self._move(where, stay, stay)  # their origins follow

    def stepped(self, ended: Tensor) -> dict[str, Tensor]:
        """After a step, which ended episodes in these rows ``[N]``: its figures."""
        self._partial &= ~ended
        levels = self._terrain.terrain_levels
        return {_figure(level): (levels == level).double() for level in range(self.count)}

    def _move_whole(self, env_ids: Any, move_up: Tensor, move_down: Tensor) -> None:
        whole = ~self._partial[env_ids]
        self._move(env_ids, move_up * whole, move_down * whole)


class OnTerrain:
    """Base of a simulator whose task may have a terrain with levels; implements
    `rallypoint.trainer.envs.simulator.AdaptiveSimulator` as far as that goes."""

    _levels: Levels | None = None

    def first_curriculum(self) -> Mapping[str, Tensor]:
        """That nothing is known yet, or nothing at all."""
        if self._levels is None:
            return {}
        return {CURRICULUM: torch.zeros(self._levels.count, dtype=torch.float64)}

    def set_curriculum(self, values: Mapping[str, Tensor]) -> None:
        """Levels that are drawn from now on are of these shares."""
        if self._levels is not None:
            self._levels.shares = values[CURRICULUM]

    def next_curriculum(
        self, values: Mapping[str, Tensor], figures: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        """The shares of the iteration that these figures are of."""
        return {
            name: torch.tensor(
                [figures[f"figure/{_figure(level)}"] for level in range(shares.numel())],
                dtype=shares.dtype,
            )
            for name, shares in values.items()
        }


def find_levels(terrain: Any) -> Levels | None:
    """The levels of a scene's terrain, None where it has none or they are in no order."""
    generator = getattr(getattr(terrain, "cfg", None), "terrain_generator", None)
    if generator is None or not generator.curriculum or terrain.terrain_origins is None:
        return None
    return Levels(terrain)


def _figure(level: int) -> str:
    return f"terrain_level_{level}"
