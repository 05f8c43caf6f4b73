"""One supervisor per run directory, held by a lock that the kernel drops with the process."""

import fcntl
import os
from typing import Self

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir


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
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
