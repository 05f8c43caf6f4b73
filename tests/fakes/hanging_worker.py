"""The fork server of workers with ledgers, one of which hangs, or fails, where a test says.

``HANG`` holds JSON: ``[where, how, slot, iteration]``; where is ``rollout`` (the middle of one), ``update``
(its beginning) or ``collective`` (the sum of a mini-batch), in the first iteration from that one on. How: ``loop`` (an endless loop of Python), ``gil`` (a call that never ends and keeps the
interpreter's lock), ``lock`` (a lock that nobody gives back), ``slow`` (each step of that rollout takes
half a second), ``nap`` (one step of it takes five), or ``drop`` (it waits in the collective, but has put nothing
into it). Only the slot's first life hangs. ``memory`` runs out of memory there. ``raise`` raises at
that iteration in the update of every life of every slot; ``raise-last`` only in that of the last rank.
"""

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor, nn

from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.trainer import forkserver, worker
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.errors import GroupBroken
from rallypoint.trainer.rollout import Rollout
from tests.fakes import ledger_worker

WHERE, HOW, SLOT, ITERATION = json.loads(os.environ["HANG"])
SLEEPS_S = {"slow": 0.5, "nap": 5.0}


def hang() -> None:
    """Never returns, but for ``slow`` and ``nap``."""
    if HOW in SLEEPS_S:
        time.sleep(SLEEPS_S[HOW])
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

    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        super().__init__(rundir, key)
        if WHERE == "collective":
            session, begin = self.session, self.session.begin_sum

            def begin_sum(name: str, value: Tensor) -> Callable[[], Tensor]:
                iteration = session.state.committed + 1
                if name == "mini_batch" and HangingLearner.armed and iteration >= ITERATION:
                    HangingLearner.armed = False
                    self.wait_for_what_was_never_begun()
                return begin(name, value)

            setattr(session, "begin_sum", begin_sum)  # noqa: B010 - a method

    def wait_for_what_was_never_begun(self) -> None:
        """As in a collective whose message was lost; ends when the supervisor says so."""
        group = self.session.group
        with group.guard("mini_batch"), self.session.presence.collective():
            while not group.released:
                time.sleep(0.01)
        raise GroupBroken("the supervisor released this generation")

    def say_ready(self) -> None:
        HangingLearner.armed = not HOW.startswith("raise") and (
            self.key.slot,
            self.key.incarnation,
        ) == (SLOT, 1)
        super().say_ready()


if __name__ == "__main__":
    ledger_worker.keep_ledgers()
    sys.exit(forkserver.main(worker_type=HangingWorker))
