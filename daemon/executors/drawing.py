"""Who draws the curves of a run: the event files here, Weights & Biases by a process of its own."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import structlog

from rallypoint.daemon.executors.curves import Curves
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir

_log = structlog.get_logger(__name__)
_HURRY_S: Final = 1.0
_FEED: Final = (sys.executable, "-m", "rallypoint.ops.wandbfeed")


class Drawing:
    """The curves of one supervisor's life. Raises `ConfigError` for what is asked for and missing."""

    def __init__(self, config: Config, rundir: RunDir) -> None:
        if config.curves.wandb and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "curves.wandb = true, but the package wandb is not installed: "
                "pip install 'rallypoint[wandb]', or set curves.wandb = false"
            )
        self._config = config
        self._rundir = rundir
        self._feed: subprocess.Popen[bytes] | None = None
        directory = config.curves.directory
        self._curves = (
            Curves(
                rundir.curves if directory is None else Path(directory),
                rundir.journal,
                job=config.job.name,
                node=config.node.name,
            )
            if config.curves.tensorboard
            else None
        )

    def start(self, job_uid: str) -> None:
        """Start the feed, where one is asked for; ``job_uid`` is the run's id there."""
        if not self._config.curves.wandb:
            return
        self._rundir.wandb.mkdir(exist_ok=True)
        with self._rundir.wandb_log.open("ab") as log:
            self._feed = subprocess.Popen(
                [*_FEED, str(self._rundir.path), job_uid],
                stdin=subprocess.PIPE,  # its end tells the feed to end, also when we are killed
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )

    def follow(self) -> None:
        """The journal has grown."""
        if self._curves is not None:
            self._curves.follow()

    async def end(self, *, hurry: bool = False) -> None:
        """Let the feed write what is left; it has ``node.stop_grace_s`` for that, in a hurry one second."""
        feed = self._feed
        if feed is None or feed.stdin is None:
            return
        feed.stdin.close()
        try:
            grace_s = _HURRY_S if hurry else self._config.node.stop_grace_s
            await asyncio.to_thread(feed.wait, grace_s)
        except subprocess.TimeoutExpired:
            feed.kill()
            feed.wait()
        if feed.returncode:
            _log.error(
                "wandb_feed_failed",
                code=feed.returncode,
                log=str(self._rundir.wandb_log),
            )
