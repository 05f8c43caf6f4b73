"""RSL-RL's side of ``rallypoint bench ppo``: ``python -m rallypoint.ops.bench.ppo_rsl_rl DIR``.

Its own runner, told our settings, on our env through its own interface. RSL-RL is no dependency of ours:
the benchmark puts it on the path of this process.
"""

import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict  # type: ignore[import-not-found]
from torch import Tensor

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import from_json
from rallypoint.ops.bench import turns
from rallypoint.ops.bench.plain import make_assigned_env
from rallypoint.ops.bench.turns import Turn
from rallypoint.trainer.envs.base import VecEnv
from rallypoint.trainer.networks import critic_group


class Adapter:
    """Our env as RSL-RL wants one. A rollout begins every T steps, as it does for us."""

    def __init__(self, env: VecEnv, rollout_steps: int) -> None:
        self.num_envs = len(env.env_ids)
        self.num_actions = env.spec.action_dim
        self.max_episode_length = env.spec.max_episode_steps
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.device = "cpu"
        self.cfg: dict[str, object] = {}
        self._env = env
        self._rollout_steps = rollout_steps
        self._steps = 0
        self._obs = env.begin_rollout(1)

    def get_observations(self) -> TensorDict:
        """The present ones, by group."""
        return TensorDict(self._obs, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        """Observations, rewards, dones, and which of them are time-outs."""
        result = self._env.step(actions)
        self._steps += 1
        self._obs = result.obs
        if self._steps % self._rollout_steps == 0:
            self._obs = self._env.begin_rollout(1 + self._steps // self._rollout_steps)
        done = result.terminated | result.truncated
        return self.get_observations(), result.reward, done, {"time_outs": result.truncated}


class Theirs:
    """RSL-RL's runner, which trains on through all turns."""

    def __init__(self, directory: Path) -> None:
        config = from_json((directory / "config.json").read_bytes())
        torch.manual_seed(config.job.seed)
        env = make_assigned_env(config, rank=0)
        adapter = Adapter(env, config.ppo.rollout_steps)
        critic = critic_group(env.spec.obs_dims)
        self._runner = _runner_class()(adapter, settings(config, critic), log_dir=None)
        self._env_steps = adapter.num_envs * config.ppo.rollout_steps
        self._update_s = 0.0
        algorithm = self._runner.alg
        algorithm.compute_returns = self._timed(algorithm.compute_returns)
        algorithm.update = self._timed(algorithm.update)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin_s = time.monotonic()
            result = call(*args)
            self._update_s += time.monotonic() - begin_s
            return result

        return timed

    def play(self, iterations: int) -> Turn:
        """One turn."""
        self._update_s = 0.0
        begin_s = time.monotonic()
        self._runner.learn(iterations)
        seconds = time.monotonic() - begin_s
        return Turn(iterations * self._env_steps, seconds, self._update_s)


def _runner_class() -> Any:
    """RSL-RL's runner, without what it imports for logs, of which it keeps none here."""
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.__dict__["SummaryWriter"] = type("SummaryWriter", (), {})
    sys.modules.update({"torch.utils.tensorboard": tensorboard, "git": types.ModuleType("git")})
    from rsl_rl.runners import OnPolicyRunner  # type: ignore[import-not-found]

    return OnPolicyRunner


def settings(config: Config, critic_obs: str) -> dict[str, Any]:
    """Our configuration in RSL-RL's words."""
    ppo = config.ppo
    critic_hidden = ppo.hidden if ppo.critic_hidden is None else ppo.critic_hidden
    distribution = {
        "class_name": "GaussianDistribution",
        "init_std": ppo.init_std,
        "std_range": ppo.std_bounds,
        "std_type": "log" if ppo.noise == "log_std" else "scalar",
    }
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": ppo.epochs,
        "num_mini_batches": ppo.mini_batches,
        "clip_param": ppo.clip,
        "gamma": ppo.gamma,
        "lam": ppo.lam,
        "value_loss_coef": ppo.value_coef,
        "entropy_coef": ppo.entropy_coef,
        "learning_rate": ppo.learning_rate,
        "max_grad_norm": ppo.max_grad_norm,
        "use_clipped_value_loss": ppo.value_loss == "clipped",
        "schedule": "fixed" if ppo.desired_kl is None else "adaptive",
        "desired_kl": ppo.desired_kl,
        "normalize_advantage_per_mini_batch": ppo.advantage_scope == "mini_batch",
    }
    return {
        "num_steps_per_env": ppo.rollout_steps,
        "save_interval": 1,  # of no use: nothing is logged or saved
        "obs_groups": {"actor": ["actor"], "critic": [critic_obs]},
        "algorithm": algorithm,
        "actor": {
            **_network(ppo.hidden, ppo.activation, normalise=ppo.normalise_actor),
            "distribution_cfg": distribution,
        },
        "critic": _network(critic_hidden, ppo.activation, normalise=ppo.normalise_critic),
    }


def _network(hidden: Sequence[int], activation: str, *, normalise: bool) -> dict[str, Any]:
    return {
        "class_name": "MLPModel",
        "hidden_dims": list(hidden),
        "activation": activation,
        "obs_normalization": normalise,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.serve(lambda: Theirs(Path(sys.argv[1])).play)
