"""A real worker that gets stuck inside a collective, as in a call of a library that never returns: slot 1
neither hears the word to let go nor sees its sockets close, from the iteration in ``STUCK_AT`` on.
"""

import os
import time

import torch.distributed as dist

from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.trainer.elastic import group
from rallypoint.trainer.worker import Worker, main

STUCK_AT = int(os.environ["STUCK_AT"])
BOUND_S = 120.0


class StuckGroup(group.ProcessGroup):
    """The real group with that wait."""

    worker: Worker

    def _wait_for_end(self, work: dist.Work) -> None:
        state = self.worker.session.state
        if self.worker.key.slot == 1 and state.committed + 1 == STUCK_AT and self._inside:
            time.sleep(BOUND_S)
        super()._wait_for_end(work)


class StuckWorker(Worker):
    """The real worker with that group."""

    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        super().__init__(rundir, key)
        self.session.group.__class__ = StuckGroup
        StuckGroup.worker = self


os._exit(main(worker_type=StuckWorker))
