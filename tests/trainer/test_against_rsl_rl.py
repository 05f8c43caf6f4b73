"""``profile = rsl_rl`` against RSL-RL 5.5.1 itself, on the same data.

It runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import Given, load
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.rng import permutation
from rallypoint.trainer.rollout import Rollout
from rallypoint.trainer.statistics import Moments, standardise
from rallypoint.trainer.update import advantages_of
from tests.fakes import rsl_rl_site, rsl_rl_update
from tests.fakes.training import Worker, make_worker

PROGRAM = Path(rsl_rl_update.__file__)
BLOCKS = (0, 1, 2, 3)
ITERATION = 2


@pytest.fixture(scope="session")
def rsl_rl() -> Path:
    """A folder with RSL-RL and what it imports, beside torch. Skips where it cannot be installed."""
    return rsl_rl_site.installed()


def settings() -> Config:
    """The profile over the task's own values, but with small nets and observations normalised."""
    given = [
        Given("job.profile", "rsl_rl", "test"),
        Given("env.task", "pointmass", "test"),
    ]
    profile = load(command_line=given).config
    return replace(
        profile,
        ppo=replace(
            profile.ppo,
            entropy_coef=0.01,
            noise="std",
            std_bounds=(1e-6, 1e6),
            std_clamp="forward",
            max_grad_norm=0.1,  # so that clipping is at work
        ),
    )


def prepared(config: Config) -> Worker:
    """A worker whose statistics are those of a first rollout."""
    worker = make_worker(config, BLOCKS)
    worker.learner.merge([worker.learner.pack(worker.collect(ITERATION - 1))])
    return worker


def raw_observations(config: Config, rollout: Rollout) -> Tensor:
    """The observations of a rollout ``[T + 1, N, D]`` as its env gave them: its actions once more."""
    env = prepared(config).env
    obs = [env.begin_rollout(ITERATION)]
    obs += [env.step(actions).obs for actions in rollout.actions]
    return torch.stack([groups["actor"] for groups in obs])


def as_rsl_rl_wants(worker: Worker, rollout: Rollout, raw_obs: Tensor) -> dict[str, Tensor]:
    """The data of an iteration, and the permutation that the update will draw."""
    live = {n: t.detach().clone() for n, t in worker.live().items() if n.startswith("model/")}
    count = worker.live()["normaliser/actor/count"]
    steps, envs = rollout.rewards.shape
    # Rows are numbered env by env here, step by step there.
    order = torch.from_numpy(permutation(1, 0, ITERATION, 0, steps * envs))
    order = order % steps * envs + order // steps
    return live | {
        "obs": raw_obs,
        "actions": rollout.actions,
        "rewards": rollout.rewards,
        "dones": rollout.terminated | rollout.truncated,
        "time_outs": (rollout.truncated & ~rollout.terminated).to(torch.float32),
        "permutation": order,
        "count": count,
        "mean": worker.live()["normaliser/actor/mean"],
        "variance": worker.live()["normaliser/actor/m2"] / count,
    }


def run_rsl_rl(
    site: Path, data: dict[str, Tensor], config: Config, directory: Path
) -> dict[str, Tensor]:
    ppo = config.ppo
    told = {
        "hidden": ppo.hidden,
        "activation": ppo.activation,
        "init_std": ppo.init_std,
        "std_bounds": ppo.std_bounds,
        "algorithm": {
            "num_learning_epochs": ppo.epochs,
            "num_mini_batches": ppo.mini_batches,
            "clip_param": ppo.clip,
            "gamma": ppo.gamma,
            "lam": ppo.lam,
            "value_loss_coef": ppo.value_coef,
            "entropy_coef": ppo.entropy_coef,
            "learning_rate": ppo.learning_rate,
            "max_grad_norm": ppo.max_grad_norm,
            "desired_kl": ppo.desired_kl,
        },
    }
    source, target = directory / "in.safetensors", directory / "out.safetensors"
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in data.items()},
        source,
        {"settings": json.dumps(told)},
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run(
        [sys.executable, PROGRAM, source, target], env=environment, check=True, timeout=100
    )
    return load_file(target)


@pytest.mark.slow
def test_one_iteration_gives_the_same(rsl_rl: Path, tmp_path: Path) -> None:
    """Advantages, losses, learning rate, parameters and statistics, in float32."""
    config = settings()
    worker = prepared(config)
    rollout = worker.collect(ITERATION)
    assert (rollout.truncated | rollout.terminated).any()
    data = as_rsl_rl_wants(worker, rollout, raw_observations(config, rollout))
    theirs = run_rsl_rl(rsl_rl, data, config, tmp_path)

    worker.update(rollout, SingleProcess(), ITERATION)
    worker.finish(rollout, SingleProcess())
    ours, figures = worker.live(), worker.history[-1]
    advantages, _ = advantages_of(rollout, config.ppo)
    advantages = standardise(advantages, Moments.of(advantages.flatten()))
    torch.testing.assert_close(advantages, theirs["advantages"], rtol=1e-5, atol=1e-5)
    for name, loss in {
        "policy_loss": "surrogate",
        "value_loss": "value",
        "entropy": "entropy",
    }.items():
        expected = theirs[f"loss/{loss}"].item()
        assert figures[name] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert ours["optimiser/learning_rate"].item() == theirs["learning_rate"].item()
    assert len(set(worker.learning_rates)) > 3  # the adaptive rule was at work
    assert figures["gradient_norm"] > 2 * 0.1  # and so was clipping
    names = [name for name in theirs if name.startswith("model/")]
    assert set(names) == {name for name in ours if name.startswith("model/")}
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5, msg=name)
        assert not torch.equal(ours[name], data[name])
    count = ours["normaliser/actor/count"]
    assert count.item() == theirs["count"].item()
    variance = ours["normaliser/actor/m2"] / count
    statistics = {"mean": ours["normaliser/actor/mean"], "variance": variance}
    for name, statistic in statistics.items():
        torch.testing.assert_close(statistic.float(), theirs[name], rtol=1e-5, atol=1e-6, msg=name)
