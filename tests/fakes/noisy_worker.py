"""A real worker; in slot 0 a library prints without end, below Python: lines of 100 bytes.

How much is in ``DIR/printed-0-<incarnation>`` (an 8-byte number), which a test reads.
"""

import mmap
import os
import sys
import threading
import time

from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.trainer import forkserver, worker

BLOCK = b"noise %s\n" % (b"x" * 93) * 1024
PAUSE_S = 0.01
"""Some 10 MB a second, so that the cores are left to the training."""


def print_without_end(count: mmap.mmap) -> None:
    """Write straight to standard output."""
    printed = 0
    while True:
        printed += os.write(1, BLOCK)
        count[:8] = printed.to_bytes(8, "little")
        time.sleep(PAUSE_S)


class NoisyWorker(worker.Worker):
    """Prints from the end of its warm-up on."""

    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        super().__init__(rundir, key)
        self._count = rundir.path / f"printed-0-{key.incarnation}"

    def say_ready(self) -> None:
        if self.key.slot == 0:
            self._count.write_bytes(bytes(8))
            with self._count.open("r+b") as file:
                count = mmap.mmap(file.fileno(), 8)
            threading.Thread(target=print_without_end, args=(count,), daemon=True).start()
        super().say_ready()


if __name__ == "__main__":
    sys.exit(forkserver.main(worker_type=NoisyWorker))
