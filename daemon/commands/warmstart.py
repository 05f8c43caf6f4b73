"""``rallypoint run --warm-start``: the checkpoint is found and held against the job before anything starts."""

import subprocess
import sys
from dataclasses import replace
from typing import Final

from rallypoint.daemon.executors import persist
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir

_TIMEOUT_S: Final = 600.0
"""A checkpoint may be read from afar."""


def prepared(config: Config, rundir: RunDir) -> Config:
    """The configuration with ``job.warm_start`` as the one checkpoint that is meant, whose parameters
    fit this job. A job that has begun needs none: it goes on from its own state, and that is said.

    Raises `ConfigError`, with what differs, for a checkpoint that cannot be read or does not fit."""
    if config.job.warm_start is None:
        return config
    if not persist.begins(rundir, config):
        print(
            f"rallypoint: {rundir.path} holds a job that has begun: it goes on from its own state, and "
            f"job.warm_start = {config.job.warm_start!r} is not looked at",
            file=sys.stderr,
        )
        return config
    return replace(config, job=replace(config.job, warm_start=_find(config)))


def _find(config: Config) -> str:
    """Full path of the checkpoint. A process of its own reads it: this one loads no torch."""
    command = [sys.executable, "-m", "rallypoint.trainer.warmstart"]
    where = f"job.warm_start = {config.job.warm_start!r}"
    try:
        found = subprocess.run(
            command,
            input=configload.to_json(config).decode(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{where}: not read within {_TIMEOUT_S:g} s") from error
    said = found.stderr.strip()
    if found.returncode:
        raise ConfigError(f"{where}: {said or f'exit code {found.returncode}'}")
    if said:
        print(f"rallypoint: {where}: {said}", file=sys.stderr)
    return found.stdout.strip()
