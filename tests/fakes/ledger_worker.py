"""The fork server of real workers that also write down which transitions they used, and for what.

``DIR/ledger/<slot>-<incarnation>.jsonl`` gets a line for each rollout collected, each rollout
committed, each report of dropped steps and each generation formed; the page beside it mirrors the
slot's page and outlives this incarnation. Each env step takes ``LEDGER_PACE_S`` seconds longer, as
with a slower simulator, so that several jobs share a small machine.
"""

import collections
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import PpoSection
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.trainer import forkserver, update, worker
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.elastic.link import Link
from rallypoint.trainer.elastic.registry import hash_text
from rallypoint.trainer.elastic.state import CommitRecord, TrainingState
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.minibatches import MiniBatch, MiniBatches
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.rollout import Rollout

PACE_S = float(os.environ.get("LEDGER_PACE_S", "0"))


class Ledger:
    """The file of this incarnation, and the use of the rollout in hand since its update began."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._digest = ""
        self._entered: collections.Counter[int] = collections.Counter()

    def begin(self, rollout: Rollout) -> None:
        """An update begins, anew or for the first time: nothing of the rollout has been used."""
        self._digest = digest(rollout)
        self._entered.clear()

    def entered(self, env_ids: NDArray[np.int64]) -> None:
        """The whole trajectories of these envs are in one mini-batch."""
        self._entered.update(env_ids.tolist())

    def commit(self, record: CommitRecord, state_hash: str) -> None:
        self.write(
            event="committed",
            iteration=record.iteration,
            generation=record.generation,
            entered=dict(self._entered),
            digest=self._digest,
            state_hash=state_hash,
        )

    def write(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


LEDGER = Ledger()


def digest(rollout: Rollout) -> str:
    """The same for the same transitions."""
    tensors = (rollout.actions, rollout.rewards, rollout.values)
    parts = [rollout.env_ids.tobytes(), *(x.contiguous().numpy().tobytes() for x in tensors)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


class LedgerPage(SlotPage):
    """Mirrors every counter into a page of this incarnation's own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._slot = path.stem
        self._folder = path.parent.parent / "ledger"
        self._mirror: SlotPage | None = None

    def put(self, **values: int) -> None:
        super().put(**values)
        if "incarnation" in values:
            name = f"{self._slot}-{values['incarnation']}"
            self._mirror = SlotPage(self._folder / f"{name}.page", create=True)
            LEDGER.path = self._folder / f"{name}.jsonl"
        if self._mirror is not None:
            self._mirror.put(**values)

    def add(self, name: str, amount: int) -> None:
        super().add(name, amount)
        if self._mirror is not None:
            self._mirror.add(name, amount)


class LedgerLearner(PpoLearner):
    """Collects at a slower pace, and notes each rollout and each update of one."""

    def collect(self, env: VecEnv, iteration: int, *, on_step: Callable[[int], None]) -> Rollout:
        def on_slow_step(t: int) -> None:
            time.sleep(PACE_S)
            on_step(t)

        rollout = super().collect(env, iteration, on_step=on_slow_step)
        if iteration:  # 0 is the warm-up's, which is undone
            LEDGER.write(
                event="collected",
                iteration=iteration,
                env_ids=rollout.env_ids.tolist(),
                env_steps=rollout.env_steps,
                digest=digest(rollout),
            )
        return rollout

    def update(
        self,
        rollout: Rollout,
        collectives: Collectives,
        module: nn.Module,
        iteration: int,
        on_optimiser_step: Callable[[], None],
    ) -> None:
        LEDGER.begin(rollout)
        super().update(rollout, collectives, module, iteration, on_optimiser_step)


class LedgerBatches(MiniBatches):
    """Notes which envs each mini-batch takes."""

    def __init__(
        self, rollout: Rollout, advantages: Tensor, returns: Tensor, config: PpoSection, seed: int
    ) -> None:
        super().__init__(rollout, advantages, returns, config, seed)
        self._env_ids = rollout.env_ids

    def _take(self, rows: Tensor) -> MiniBatch:
        LEDGER.entered(self._env_ids[rows.numpy()])
        return super()._take(rows)


class LedgerState(TrainingState):
    """Notes each commit, however it comes about."""

    def commit(self) -> CommitRecord:
        record = super().commit()
        LEDGER.commit(record, hash_text(self.snapshot.hash()))
        return record


class LedgerLink(Link):
    """Notes what the worker says of generations formed and steps dropped."""

    def send(self, message: messages.WorkerMessage) -> None:
        match message:
            case messages.Formed():
                LEDGER.write(
                    event="formed",
                    generation=message.generation,
                    iteration=message.iteration,
                    source=[message.source.slot, message.source.incarnation],
                )
            case messages.StepsLost():
                LEDGER.write(event="lost", env_steps=message.env_steps)
        super().send(message)


class LedgerWorker(worker.Worker):
    """The real worker with that learner."""

    learner_type = LedgerLearner


def keep_ledgers() -> None:
    """From now on the parts of a worker in this process keep ledgers."""
    for kind in (LedgerPage, LedgerState, LedgerLink):
        setattr(worker, kind.__bases__[0].__name__, kind)
    update.__dict__["MiniBatches"] = LedgerBatches


if __name__ == "__main__":
    keep_ledgers()
    sys.exit(forkserver.main(worker_type=LedgerWorker))
