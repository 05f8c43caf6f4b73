"""Where checkpoints go, checked before a worker starts: the supervisor never loads what writes them."""

import json
import tempfile
from pathlib import Path

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir


def require_checkpoint_place(rundir: RunDir, config: Config) -> None:
    """Make the directory of the checkpoints and see that it can be written, and that a teacher is there.

    Raises `ConfigError` when it cannot, for a teacher of another task, and for a URL of another scheme than a local directory's.
    """
    if config.distill.teacher is not None and "://" not in config.distill.teacher:
        _require_teacher(config.distill.teacher, config.env.task)
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


def _require_teacher(teacher: str, task: str) -> None:
    """Whether a checkpoint is there, of this task; workers verify it when they read it."""
    path = Path(teacher)
    if not path.exists():
        raise ConfigError(f"distill.teacher = {teacher!r}: no such file or directory")
    for pattern in ("manifest.json", "*/manifest.json", "checkpoints/*/manifest.json"):
        for manifest in path.glob(pattern):
            try:
                theirs = json.loads(manifest.read_bytes())["config"]["env"]["task"]
            except (OSError, ValueError, LookupError, TypeError):
                continue  # damaged: workers say so, and may find another one
            if theirs != task:
                raise ConfigError(
                    f"distill.teacher = {teacher!r} was trained on the task {theirs!r}, but env.task = "
                    f"{task!r}; give a teacher of that task, or --set env.task={theirs}"
                )
            return
    raise ConfigError(
        f"distill.teacher = {teacher!r}: no committed checkpoint; give a checkpoint (a directory with "
        "manifest.json), a directory of checkpoints, or the directory of a run"
    )
