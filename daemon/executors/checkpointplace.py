"""Where checkpoints go, checked before a worker starts: the supervisor never loads what writes them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import structlog

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir, is_remote
from rallypoint.daemon.shared.survey import Survey

_log = structlog.get_logger(__name__)
_SURVEY: Final = (sys.executable, "-m", "rallypoint.checkpointing.place")
_SURVEY_S: Final = 30.0


def require_checkpoint_place(rundir: RunDir, config: Config) -> Survey | None:
    """Make the directory of the checkpoints and see that it can be written, and that a teacher is there;
    of a URL, what a process of its own found there (None without one).

    Raises `ConfigError` when it cannot be used, or for a teacher of another task. A store that only
    does not answer is used by a run that knows its own state; it may be back for the next checkpoint.
    """
    if config.distill.teacher is not None and not is_remote(config.distill.teacher):
        _require_teacher(config.distill.teacher, config.env.task)
    url, path = config.checkpoint.url, rundir.checkpoints(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"checkpoint.url = {path}: checkpoints cannot be written there: {error.strerror}; give "
            "another directory with --set checkpoint.url=DIRECTORY, or its permissions"
        ) from error
    if url is None or not is_remote(url):
        return None
    return _judged(_look_at(url, config.checkpoint.credentials_file), known=rundir.state.exists())


def _look_at(url: str, credentials_file: str | None) -> Survey:
    command = [*_SURVEY, url, *([credentials_file] if credentials_file else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SURVEY_S, check=False)
    except subprocess.TimeoutExpired:
        return Survey(verdict="unreachable", words=f"{url}: no answer within {_SURVEY_S:g} s")
    try:
        return msgspec.json.decode(done.stdout, type=Survey)
    except msgspec.MsgspecError:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(
            f"checkpoint.url = {url!r} could not be looked at (exit code {done.returncode}): {said}"
        ) from None


def _judged(survey: Survey, *, known: bool) -> Survey:
    if survey.verdict == "refused":
        raise ConfigError(f"checkpoint.url cannot be used: {survey.words}")
    if survey.verdict == "unreachable" and not known:
        raise ConfigError(
            f"checkpoint.url does not answer: {survey.words}; a new run must know what it holds, so "
            "make it reachable, or give another one"
        )
    return survey


def log_survey(survey: Survey | None) -> None:
    """Say what is not as it should be at the checkpoints' URL, once there is a log."""
    if survey is not None and survey.verdict == "unreachable":
        _log.error(
            "checkpoint_store_unreachable",
            error=survey.words,
            meaning="training goes on; each checkpoint tries again",
        )
    if survey is not None and survey.verdict == "unconditional":
        _log.warning(
            "checkpoint_store_unconditional",
            error=survey.words,
            meaning="checkpoints there are kept apart by their unique names alone",
        )


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
