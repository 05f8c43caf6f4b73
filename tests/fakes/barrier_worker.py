"""A real worker whose barrier fails once: slot 0 enters it, so that the others leave it, and then
loses its connection before it has left it itself.

Run as the worker's program; the iteration is in ``BARRIER_FAILS_AT``.
"""

import os

from torch import Tensor

from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.trainer.errors import GroupBroken
from rallypoint.trainer.worker import Worker, main

FAILS_AT = int(os.environ["BARRIER_FAILS_AT"])


class BarrierWorker(Worker):
    """The real worker with that barrier."""

    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        super().__init__(rundir, key)
        session, reduce = self.session, self.session.all_reduce_sum
        pending = key.slot == 0

        def all_reduce_sum(name: str, value: Tensor) -> Tensor:
            nonlocal pending
            result = reduce(name, value)
            if pending and name == "barrier" and session.state.committed + 1 == FAILS_AT:
                pending = False
                raise GroupBroken("barrier: connection lost, as the test wants it")
            return result

        setattr(session, "all_reduce_sum", all_reduce_sum)  # noqa: B010 - a method, for once


os._exit(main(worker_type=BarrierWorker))
