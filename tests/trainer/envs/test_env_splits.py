"""Results do not depend on how global env ids are spread over processes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config, EnvSection
from rallypoint.trainer.envs.factory import EMBEDDED_TASKS, make_env
from rallypoint.trainer.rng import policy_noise

TOTAL = 64
STEPS = 50
ALL = np.arange(TOTAL)
Parts = list[NDArray[np.int64]]
Policy = Callable[[Tensor, Tensor], Tensor]

ANY_SPLIT: dict[str, Parts] = {
    "halves": [ALL[:32], ALL[32:]],
    "uneven": [ALL[:5], ALL[5:6], ALL[6:]],
    "interleaved": [ALL[r::3] for r in range(3)],
    "single": [ALL[:1], ALL[1:2], ALL[2:]],
}
BLOCK_SPLIT: dict[str, Parts] = {
    "halves": [ALL[:32], ALL[32:]],
    "uneven": [ALL[:8], ALL[8:24], ALL[24:]],
    "interleaved": [
        np.concatenate([ALL[b : b + 8] for b in range(8 * r, 64, 24)]) for r in range(3)
    ],
}


@dataclass
class Transcript:
    """All that TOTAL envs returned over two rollouts, by global env id."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Transcript)
        mine, theirs = vars(self), vars(other)
        return all(torch.equal(mine[name], theirs[name]) for name in mine)


def run(task: str, parts: Parts, policy: Policy, dtype: torch.dtype = torch.float32) -> Transcript:
    config = Config(env=EnvSection(task=task))
    spec = make_env(config, dtype=dtype).spec
    out = Transcript(
        obs=torch.zeros(2 * STEPS, TOTAL, spec.obs_dims["actor"], dtype=dtype),
        reward=torch.zeros(2 * STEPS, TOTAL, dtype=dtype),
        terminated=torch.zeros(2 * STEPS, TOTAL, dtype=torch.bool),
        truncated=torch.zeros(2 * STEPS, TOTAL, dtype=torch.bool),
    )
    for ids in parts:
        env = make_env(config, dtype=dtype)
        env.assign(ids, iteration=1)
        for rollout in range(2):
            obs = env.begin_rollout(rollout + 1)["actor"]
            noise = policy_noise(9, ids, rollout + 1, STEPS, spec.action_dim, dtype)
            for t in range(STEPS):
                result = env.step(policy(obs, noise[t].contiguous()))
                obs = result.obs["actor"]
                row = rollout * STEPS + t
                out.obs[row, ids] = obs
                out.reward[row, ids] = result.reward
                out.terminated[row, ids] = result.terminated
                out.truncated[row, ids] = result.truncated
    return out


def given_actions(obs: Tensor, noise: Tensor) -> Tensor:
    return noise


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("task", list(EMBEDDED_TASKS))
def test_given_actions_any_split_is_bit_identical(task: str, dtype: torch.dtype) -> None:
    whole = run(task, [ALL], given_actions, dtype)
    assert whole.terminated.any()
    assert whole.truncated.any()
    for name, parts in ANY_SPLIT.items():
        assert run(task, parts, given_actions, dtype) == whole, name


@pytest.mark.slow
@pytest.mark.parametrize("task", list(EMBEDDED_TASKS))
def test_with_a_policy_any_split_by_whole_blocks_is_bit_identical(task: str) -> None:
    spec = make_env(Config(env=EnvSection(task=task)), dtype=torch.float32).spec
    generator = torch.Generator().manual_seed(4)
    net = nn.Sequential(
        nn.Linear(spec.obs_dims["actor"], 64),
        nn.ELU(),
        nn.Linear(64, 64),
        nn.ELU(),
        nn.Linear(64, spec.action_dim),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))

    def policy(obs: Tensor, noise: Tensor) -> Tensor:
        # Block by block: for 8 rows in all, the matrix product may take another kernel (seen with
        # 2 outputs), which is no property of an env.
        with torch.no_grad():
            mean = torch.cat([net(block) for block in torch.split(obs.contiguous(), 8)])
        return mean + 0.5 * noise

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = run(task, [ALL], policy)
        assert (whole.terminated | whole.truncated).any()
        for name, parts in BLOCK_SPLIT.items():
            assert run(task, parts, policy) == whole, name
    finally:
        torch.set_num_threads(threads)
