"""Sizes of a job's collectives, from its real networks, env and record.

``python -m rallypoint.trainer.sizes`` reads a configuration as JSON and writes `Sizes` as JSON: the
supervisor's commands ask it in a process of its own, since they load no torch.
"""

import sys
from dataclasses import replace

import msgspec
import numpy as np
import torch

from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.collectives import Sizes
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import from_json
from rallypoint.trainer.elastic.envrows import register_curriculum
from rallypoint.trainer.elastic.packet import header_bytes
from rallypoint.trainer.elastic.registry import StateRegistry
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.ppo import DTYPES


def find_sizes(config: Config) -> Sizes:
    """Builds the learner, and runs a rollout of one step in one env block."""
    short = replace(config, ppo=replace(config.ppo, rollout_steps=1))
    env = make_env(short, dtype=DTYPES[config.ppo.dtype])
    try:
        learner = learner_type(config)(short, env.spec, torch.device("cpu"))
        registry = StateRegistry()
        learner.register(registry)
        register_curriculum(registry, env)
        state = TrainingState(registry)
        env.assign(np.arange(config.env.block, dtype=np.int64), iteration=0)
        learner.on_assign(env.env_ids)
        record = learner.pack(learner.collect(env, 0, on_step=lambda _: None))
        rows_bytes = sum(rows.nbytes for rows in env.rows().values())
        rows_bytes += sum(rows.nbytes for rows in registry.read_rows().values())
    finally:
        env.close()
    return Sizes(
        parameters_bytes=sum(p.nbytes for p in learner.module.parameters() if p.requires_grad),
        state_bytes=state.snapshot.buffer.nbytes,
        record_values=record.numel(),
        header_bytes=header_bytes(config),
        moment_values=learner.moment_values,
        mini_batches=config.ppo.epochs * config.ppo.mini_batches,
        latent=config.aux.latent is not None,
        rank_blocks=_rank_envs(config) // config.env.block,
        job_blocks=config.env.num_envs // config.env.block,
        block_rows_bytes=rows_bytes,
    )


def _rank_envs(config: Config) -> int:
    """Most envs of one rank at the greatest world size."""
    world_size = envbudget.world_size_range(config)[1]
    ranks = world_size if config.env.budget == "global" else 1
    return envbudget.split(config.env.num_envs, ranks, config.env.block)[0]


if __name__ == "__main__":
    found = find_sizes(from_json(sys.stdin.buffer.read()))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
