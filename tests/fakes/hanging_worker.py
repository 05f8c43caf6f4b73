"""A real worker with ledgers whose program hangs, or fails, where a test says.

``HANG`` holds JSON: ``[where, how, slot, iteration]``; where is ``rollout`` (the middle of one) or ``update``
(its beginning), in the first iteration from that one on. How: ``loop`` (an endless loop of Python), ``gil`` (a call that never ends and keeps the
interpreter's lock), ``lock`` (a lock that nobody gives back), or ``slow`` (each step of that rollout takes
half a second). Only the slot's first life hangs. ``memory`` runs out of memory there. ``raise`` raises at
that iteration in the update of every life of every slot; ``raise-last`` only in that of the last rank.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable

from torch import nn

from rallypoint.trainer import worker
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.rollout import Rollout
from tests.fakes import ledger_worker

WHERE, HOW, SLOT, ITERATION = json.loads(os.environ["HANG"])
STEP_S = 0.5


def hang() -> None:
    """Never returns, but for ``slow``."""
    if HOW == "slow":
        time.sleep(STEP_S)
    elif HOW == "memory":
        raise MemoryError("no memory is left")
    elif HOW == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif HOW == "gil":
        ctypes.PyDLL(None).sleep(3600)
    else:
        while True:
            pass


class HangingLearner(ledger_worker.LedgerLearner):
    """Hangs in the first iteration from the one given, if its worker is the one."""

    armed = False
    begun = 0
    """The iteration in which it hangs; 0: not yet."""

    def collect(self, env: VecEnv, iteration: int, *, on_step: Callable[[int], None]) -> Rollout:
        def on_hanging_step(t: int) -> None:
            if self._hangs("rollout", iteration) and (t == 4 or HOW == "slow"):
                hang()
            on_step(t)

        return super().collect(env, iteration, on_step=on_hanging_step)

    def update(
        self,
        rollout: Rollout,
        collectives: Collectives,
        module: nn.Module,
        iteration: int,
        on_optimiser_step: Callable[[], None],
    ) -> None:
        if self._hangs("update", iteration):
            hang()
        last = collectives.rank == collectives.world_size - 1
        if iteration == ITERATION and (HOW == "raise" or (HOW == "raise-last" and last)):
            raise ValueError("a program error")
        super().update(rollout, collectives, module, iteration, on_optimiser_step)

    def _hangs(self, where: str, iteration: int) -> bool:
        if not self.armed or where != WHERE or iteration < ITERATION:
            return False
        self.begun = self.begun or iteration
        return iteration == self.begun


class HangingWorker(worker.Worker):
    """Arms its learner in the slot's first life."""

    learner_type = HangingLearner

    def say_ready(self) -> None:
        HangingLearner.armed = not HOW.startswith("raise") and (
            self.key.slot,
            self.key.incarnation,
        ) == (SLOT, 1)
        super().say_ready()


if __name__ == "__main__":
    ledger_worker.keep_ledgers()
    os._exit(worker.main(worker_type=HangingWorker))
