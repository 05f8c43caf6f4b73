"""A real worker; in slot 0 a library prints without end, below Python: lines of 100 bytes.

How much is in ``DIR/printed-0-<incarnation>`` (an 8-byte number), which a test reads.
"""

import mmap
import os
import sys
import threading
import time
from pathlib import Path

from rallypoint.trainer import worker

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


def main() -> int:
    """The worker, with a thread that prints."""
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    if given["--slot"] == "0":
        path = Path(given["--dir"], f"printed-0-{given['--incarnation']}")
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            count = mmap.mmap(file.fileno(), 8)
        threading.Thread(target=print_without_end, args=(count,), daemon=True).start()
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
