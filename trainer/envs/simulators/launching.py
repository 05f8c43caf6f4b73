"""Starting a heavy simulator: one at a time per host, watched, in stages that have names.

Simulators share caches (shaders, kernels, extensions) that were not made for several processes filling
them at once, and a start that hangs says nothing by itself.
"""

import contextlib
import faulthandler
import fcntl
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.exitcodes import EXIT_RESTART_COLD
from rallypoint.trainer.errors import EnvError

_POLL_S: Final = 0.05
_BACKSTOP_S: Final = 10.0
"""How much later the C-level watchdog strikes, should the interpreter's lock never be given up."""


class LaunchTimeoutError(EnvError):
    """Another process held the host's launch lock for too long; the message says which."""


def lock_path(simulator: str) -> Path:
    """The launch lock of a simulator, for all processes of this user on this host."""
    return Path(tempfile.gettempdir()) / f"rallypoint-launch-{simulator}-{os.getuid()}.lock"


@contextlib.contextmanager
def launch_lock(
    path: Path, *, owner: str, timeout_s: float, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock at ``path``, which says its ``owner``; it falls with the process that holds it.

    ``on_wait(owner)`` is called once if somebody else has it. Raises `LaunchTimeoutError`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    try:
        _take(file, path, timeout_s, on_wait)
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
        yield
    finally:
        os.close(file)


def _take(file: int, path: Path, timeout_s: float, on_wait: Callable[[str], None]) -> None:
    began_s = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 512, 0).decode(errors="replace") or "somebody"
            if not told:
                on_wait(holder)
                told = True
            if time.monotonic() - began_s > timeout_s:
                raise LaunchTimeoutError(
                    f"the launch lock {path} has been held by {holder} for more than {timeout_s:g} s; "
                    "end that process if it hangs, or raise env.launch_timeout_s"
                ) from None
            time.sleep(_POLL_S)
        else:
            return


def end_process(stage: str, seconds: float) -> None:
    """What happens to a start that stands still: all stacks, the stage, and the end of this process;
    its slot restarts cold."""
    sys.stderr.write(
        f"start-up has stood in the stage {stage!r} for {seconds:.0f} s: ending this process; "
        "its slot restarts cold\n"
    )
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_RESTART_COLD)


class StartUpWatch:
    """Watches a start from a thread of its own: each stage may take ``timeout_s``."""

    def __init__(
        self,
        timeout_s: float,
        on_stuck: Callable[[str, float], None] = end_process,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """``on_stage`` is told each stage, and "" at the end."""
        self._timeout_s = timeout_s
        self._on_stage = on_stage
        self._on_stuck = on_stuck
        self._stage = "beginning"
        self._since_s = time.monotonic()
        self._moved = threading.Condition()
        self._over = False

    def stage(self, name: str) -> None:
        """The start has come to this stage; the process's log says so."""
        self._on_stage(name)
        with self._moved:
            took_s = time.monotonic() - self._since_s
            sys.stderr.write(f"start-up: {self._stage} took {took_s:.1f} s; now {name}\n")
            sys.stderr.flush()
            self._stage, self._since_s = name, time.monotonic()
            if self._on_stuck is end_process:
                # Also where C code never gives up the interpreter's lock; the log has named the stage.
                faulthandler.dump_traceback_later(self._timeout_s + _BACKSTOP_S, exit=True)
            self._moved.notify()

    @contextlib.contextmanager
    def watching(self) -> Iterator["StartUpWatch"]:
        """Watch while in this context."""
        thread = threading.Thread(target=self._watch, name="start-up-watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._on_stage("")
            faulthandler.cancel_dump_traceback_later()
            with self._moved:
                self._over = True
                self._moved.notify()
            thread.join()

    def _watch(self) -> None:
        with self._moved:
            while not self._over:
                left_s = self._since_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    self._on_stuck(self._stage, time.monotonic() - self._since_s)
                    return
                self._moved.wait(left_s)
