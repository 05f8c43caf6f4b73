"""The trainer against a plain PPO in one process, in float64."""

import numpy as np
import pytest
import torch

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import Given, load
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.rng import permutation, policy_noise
from tests.fakes.reference_ppo import Draws, ReferencePpo
from tests.fakes.training import BLOCK, config, make_worker, train

BLOCKS = np.arange(4)
ITERATIONS = 50
SEED = 1


def as_shipped() -> Config:
    """What a user of the pointmass gets, in float64 and with SONIC's KL."""
    values = {"env.task": "pointmass", "ppo.dtype": "float64", "ppo.kl_form": "sonic"}
    return load(command_line=[Given(path, v, "test") for path, v in values.items()]).config


def draws(settings: Config) -> Draws:
    """The trainer's own keyed draws."""
    steps, ids = settings.ppo.rollout_steps, np.arange(len(BLOCKS) * BLOCK)
    return Draws(
        noise=lambda k: policy_noise(SEED, ids, k, steps, 2, torch.float64),
        order=lambda k, epoch: torch.from_numpy(permutation(SEED, BLOCKS, k, epoch, BLOCK)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [as_shipped(), config()], ids=["as shipped", "as in tests"])
def test_fifty_iterations_end_with_the_same_parameters(settings: Config) -> None:
    """The KL in either form, with and without a prior of the normaliser."""
    start = {
        n: p.detach() for n, p in make_worker(settings, (0,)).learner.module.named_parameters()
    }
    env = make_env(settings, dtype=torch.float64)
    env.assign(np.arange(len(BLOCKS) * BLOCK), iteration=0)
    reference = ReferencePpo(env, start, draws(settings), settings.ppo)
    for iteration in range(1, ITERATIONS + 1):
        reference.iterate(iteration)

    worker = train(settings, [BLOCKS.tolist()], ITERATIONS)[0]
    assert worker.learning_rates == reference.learning_rates
    assert len(set(worker.learning_rates)) > 10  # the adaptive rule was at work
    for name, parameter in reference.parameters().items():
        found = worker.live()[f"model/{name}"]
        torch.testing.assert_close(found, parameter, rtol=0, atol=1e-10, msg=name)
        assert (found - start[name]).abs().max() > 1e-3
