"""A warm start: parameters and statistics of observations from a checkpoint, everything else anew.

``python -m rallypoint.trainer.warmstart`` reads a configuration as JSON and writes the full path of the
checkpoint that ``job.warm_start`` means, once its parameters have been held against those of the job: the
supervisor's command asks it in a process of its own, since it loads no torch.
"""

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rallypoint.checkpointing.restore import LoadedCheckpoint, load_checkpoint
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import from_json
from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.trainer import fitting
from rallypoint.trainer.elastic.registry import StateRegistry
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.ppo import DTYPES


def _wanted(name: str) -> bool:
    return name.startswith(("model/", "normaliser/"))


def load(
    url: str, config: Config, live: Mapping[str, Tensor], say: Callable[[str], None]
) -> LoadedCheckpoint:
    """Put parameters and statistics of the newest checkpoint at ``url`` that verifies into ``live``
    state, in its number types. ``say`` is told of newer ones that do not verify, and of another task.

    Raises `CheckpointMismatch`, with what differs, when shapes do not fit, or when the configuration makes
    another function of them; then nothing was changed. `CheckpointError` when none can be read."""
    loaded = load_checkpoint(url, config.checkpoint.credentials_for(url))
    for skipped in loaded.skipped:
        say(f"skipped a newer checkpoint: {skipped}")
    mine = {name: tensor for name, tensor in live.items() if _wanted(name)}
    fitting.require_fit(
        loaded,
        mine,
        config,
        keys=fitting.FUNCTION.__contains__,
        names=_wanted,
        dtypes=False,
        remedy="Set the keys of the networks and of the normaliser to those of the checkpoint",
    )
    task = loaded.manifest.config.get("env", {}).get("task")
    if task != config.env.task:
        say(f"{loaded.info.path} was trained on the task {task!r}, this job is {config.env.task!r}")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(loaded.tensors[name])
    return loaded


def _check(config: Config) -> str:
    """Full path of the checkpoint, which fits a learner of this job."""
    if config.job.warm_start is None:
        raise RallypointError("job.warm_start is not set: there is nothing to look for")
    env = make_env(config, dtype=DTYPES[config.ppo.dtype])
    try:
        learner = learner_type(config)(config, env.spec, torch.device("cpu"))
    finally:
        env.close()
    registry = StateRegistry()
    learner.register(registry)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    return load(config.job.warm_start, config, registry.shared(), say).info.path


if __name__ == "__main__":
    try:
        print(_check(from_json(sys.stdin.buffer.read())))
    except RallypointError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
