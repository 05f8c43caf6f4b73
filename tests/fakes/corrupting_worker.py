"""A real worker whose memory goes wrong: slot 1 flips one bit of a parameter after one update.

Run as the worker's module; the iteration is in ``CORRUPT_AT``.
"""

import os
import sys
from collections.abc import Callable

import torch
from torch import nn

from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.worker import Worker, main

CORRUPT_AT = int(os.environ["CORRUPT_AT"])
SLOT = int(sys.argv[sys.argv.index("--slot") + 1])


class CorruptingLearner(PpoLearner):
    """Flips the last bit of one weight, once."""

    def update(
        self,
        rollout: Rollout,
        collectives: Collectives,
        module: nn.Module,
        iteration: int,
        on_optimiser_step: Callable[[], None],
    ) -> None:
        super().update(rollout, collectives, module, iteration, on_optimiser_step)
        global CORRUPT_AT
        if SLOT == 1 and iteration == CORRUPT_AT:
            CORRUPT_AT = -1
            with torch.no_grad():
                next(self.module.parameters()).view(-1).view(torch.int32)[0] ^= 1


class CorruptingWorker(Worker):
    """The real worker with that learner."""

    learner_type = CorruptingLearner


os._exit(main(worker_type=CorruptingWorker))
