"""Where checkpoints go, checked before a worker starts: the supervisor never loads what writes them."""

import tempfile
from pathlib import Path

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir


def require_checkpoint_place(rundir: RunDir, config: Config) -> None:
    """Make the directory of the checkpoints and see that it can be written, and that a teacher is there.

    Raises `ConfigError` when it cannot, and for a URL of another scheme than a local directory's.
    """
    teacher = config.distill.teacher
    if teacher is not None and "://" not in teacher and not Path(teacher).exists():
        raise ConfigError(f"distill.teacher = {teacher!r}: no such file or directory")
    url, path = config.checkpoint.url, rundir.checkpoints(config)
    if url is not None and "://" in url and not url.startswith("file:///"):
        raise ConfigError(
            f"checkpoint.url = {url!r} is not supported yet; give a local directory, as a path or as "
            "file:///absolute/path"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"checkpoint.url = {path}: checkpoints cannot be written there: {error.strerror}; give "
            "another directory with --set checkpoint.url=DIRECTORY, or its permissions"
        ) from error
