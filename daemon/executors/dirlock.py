"""One supervisor per run directory, held by a lock that the kernel drops with the process, and whether it
can write there."""

import fcntl
import os
from typing import Self

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir


def _require_own_files(rundir: RunDir) -> None:
    """Raises `ConfigError` for what is there of an earlier run and cannot be gone on with: somebody else's
    (a run as root, say), or a directory where a file is written. A damaged one is no matter here."""
    files = (rundir.books, rundir.journal, rundir.config, rundir.workers, rundir.notices)
    for path in (*files, rundir.admin_socket, rundir.control_socket):
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory, but a file is written there; move it away")
    for path in (rundir.slots, rundir.fork_server_log.parent):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: is no directory, but files are written in it; move it away")
    for path in (*files, rundir.slots, rundir.fork_server_log.parent):
        if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
            raise ConfigError(
                f"{path}: cannot be written: Permission denied; give it to this user, or give another --dir"
            )


class DirectoryLock:
    """The held lock. Raises `ConfigError` when it cannot be had."""

    def __init__(self, rundir: RunDir) -> None:
        try:
            rundir.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(rundir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{rundir.path}: the run's directory cannot be written: {error.strerror}; give "
                "another one with --dir, or its permissions"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise ConfigError(
                f"{rundir.path}: another supervisor (pid {holder}) runs in this directory; stop it "
                f"with `rallypoint stop --dir {rundir.path}`, or give another --dir"
            ) from error
        try:
            _require_own_files(rundir)
        except ConfigError:
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
