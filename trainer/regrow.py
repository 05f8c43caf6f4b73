"""A worker whose simulator is too small, and can be another size in a new process only.

With ``resize = "restart"`` a plan gives nobody more than was built for, so after a loss that lasts, a
global budget has a deficit. Then one worker at a time starts again, built for its share of the present
world, while the others train on; the state is safe with them.
"""

import time
from pathlib import Path

from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.config import EnvSection
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.trainer.errors import RestartCold


def outgrown(plan: Plan, key: WorkerKey, env: EnvSection, iteration: int) -> int | None:
    """How many envs this worker should be built for, if it is its turn to start again: in a plan with a
    deficit, where somebody else keeps the state, those that can hold less than their share take turns
    by the iteration, which all have in common. So never two go at one safe point, and one that has tried
    in vain lets the others pass."""
    if env.budget != "global" or plan.world_size < 2:
        return None
    if plan.num_envs(env.block) >= plan.budget_envs:
        return None
    share = envbudget.split(plan.budget_envs, plan.world_size, env.block)[0]
    share = min(share, env.max_envs or share)
    small = [m.key for m in plan.members if 0 < m.capacity_envs < share]
    return share if small and small[iteration % len(small)] == key else None


class Regrow:
    """Decides, at each safe point, whether this worker starts again. The main thread uses it."""

    def __init__(
        self, key: WorkerKey, env: EnvSection, note: Path, *, asked: int, boot_s: float
    ) -> None:
        """``note`` is a file of the slot that its next life reads; ``asked`` is how many envs this life
        was built for, or tried to be; ``boot_s`` is how long it took to be ready."""
        self._key = key
        self._env = env
        self._note = note
        self._asked = asked
        self._boot_s = boot_s
        self._generation = 0
        self._since_s = 0.0

    def at_safe_point(self, plan: Plan, iteration: int) -> None:
        """After this iteration: raises `RestartCold` when it is this worker's turn. A generation first lasts for twice as long as
        a start takes: whoever was lost would be back by then."""
        now_s = time.monotonic()
        if plan.generation != self._generation:
            self._generation, self._since_s = plan.generation, now_s
        wanted = outgrown(plan, self._key, self._env, iteration)
        if wanted is None or wanted <= self._asked:
            return
        if now_s - self._since_s >= 2.0 * self._boot_s:
            self._note.write_text(str(wanted))
            raise RestartCold(
                f"{self._key} was built for {self._asked} envs, its share has grown to {wanted}, and only "
                "a new process can hold another number"
            )


def noted(note: Path) -> int:
    """What an earlier life of the slot wants the next one to be built for; 0: nothing."""
    return int(note.read_text()) if note.exists() else 0
