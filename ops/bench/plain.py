"""The trainer without anything elastic: what the throughput benchmark compares with.

One process per rank: ``python -m rallypoint.ops.bench.plain MODE DIR RANK WORLD_SIZE WARM_UP ITERATIONS``,
with ``DIR/config.json``. ``plain`` trains under DDP with no session, snapshot, journal or hash;
``env`` only steps the simulator, with actions drawn beforehand. Rank r writes ``DIR/rank-r.json``.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import from_json
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.ppo import DTYPES
from rallypoint.trainer.rng import policy_noise

Iterate = Callable[[int], None]


class PlainCollectives:
    """`Collectives` straight on torch's default group."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        out = [torch.empty_like(value) for _ in range(self.world_size)]
        dist.all_gather(out, value)
        return out

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(value, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return value

        return wait

    def replicated(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def wait_for_gradients(self) -> None:
        return None

    def hit(self, failpoint: str) -> None:
        return None


def make_assigned_env(config: Config, rank: int) -> VecEnv:
    """The env of this rank, with ``env.num_envs`` envs."""
    env = make_env(config, dtype=DTYPES[config.ppo.dtype])
    size = config.env.num_envs
    env.assign(np.arange(rank * size, (rank + 1) * size, dtype=np.int64), iteration=0)
    return env


def training(config: Config, env: VecEnv) -> Iterate:
    """One iteration of plain training."""
    learner = learner_type(config)(config, env.spec, torch.device("cpu"))
    learner.on_assign(env.env_ids)
    collectives = PlainCollectives()
    module = collectives.replicated(learner.module)

    def iterate(iteration: int) -> None:
        rollout = learner.collect(env, iteration, on_step=lambda _: None)
        learner.update(rollout, collectives, module, iteration, lambda: None)
        learner.merge(collectives.all_gather("last", learner.pack(rollout)))
        if not learner.finite():
            raise RuntimeError(f"iteration {iteration}: parameters are not finite")

    return iterate


def stepping(config: Config, env: VecEnv) -> Iterate:
    """One rollout of random actions, the noise of an untrained policy."""
    steps, action_dim = config.ppo.rollout_steps, env.spec.action_dim
    dtype = DTYPES[config.ppo.dtype]
    noise = policy_noise(config.job.seed, env.env_ids, 1, steps, action_dim, dtype)

    def iterate(iteration: int) -> None:
        env.begin_rollout(iteration)
        for actions in noise * config.ppo.init_std:
            env.step(actions)

    return iterate


def run(mode: str, directory: Path, rank: int, world_size: int, warm_up: int, count: int) -> None:
    """Run and time ``count`` iterations after ``warm_up`` others, all ranks at once."""
    torch.set_num_threads(1)
    config = from_json((directory / "config.json").read_bytes())
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size
    )
    env = make_assigned_env(config, rank)
    iterate = {"plain": training, "env": stepping}[mode](config, env)
    for iteration in range(1, warm_up + 1):
        iterate(iteration)
    dist.barrier()
    begin_s = time.monotonic()
    for iteration in range(warm_up + 1, warm_up + count + 1):
        iterate(iteration)
    dist.barrier()  # the slowest rank decides, as in training
    seconds = time.monotonic() - begin_s
    env_steps = count * config.env.num_envs * config.ppo.rollout_steps
    (directory / f"rank-{rank}.json").write_text(
        json.dumps({"env_steps": env_steps, "seconds": seconds})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:7]))
