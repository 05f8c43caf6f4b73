"""One PPO iteration by RSL-RL itself, on data that a test has written: started as a program.

``python rsl_rl_update.py IN.safetensors OUT.safetensors`` with `rsl_rl` on the path. It imports nothing
of ours. RSL-RL computes all: values, densities, advantages, losses, learning rate, steps.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP = "policy"


def load_rsl_rl() -> Any:
    """RSL-RL's modules, without the packages that it needs for logging only."""
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.__dict__["SummaryWriter"] = type("SummaryWriter", (), {})
    sys.modules["torch.utils.tensorboard"] = writer
    sys.modules["git"] = types.ModuleType("git")
    import rsl_rl.algorithms  # type: ignore[import-not-found]
    import rsl_rl.models  # type: ignore[import-not-found]
    import rsl_rl.storage  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]

    return types.SimpleNamespace(
        PPO=rsl_rl.algorithms.PPO,
        MLPModel=rsl_rl.models.MLPModel,
        RolloutStorage=rsl_rl.storage.RolloutStorage,
        observe=lambda obs: TensorDict({GROUP: obs}, batch_size=[obs.shape[0]]),
    )


def build(rsl: Any, data: dict[str, Tensor], settings: dict[str, Any]) -> Any:
    """The algorithm with the parameters and statistics in ``data``."""
    first = rsl.observe(data["obs"][0])
    groups = {"actor": [GROUP], "critic": [GROUP]}
    common = (settings["hidden"], settings["activation"], True)
    noise = {
        "class_name": "rsl_rl.modules.distribution.GaussianDistribution",
        "init_std": settings["init_std"],
        "std_range": tuple(settings["std_bounds"]),
        "std_type": "scalar",
    }
    steps, envs, actions = data["actions"].shape
    actor = rsl.MLPModel(first, groups, "actor", actions, *common, noise)
    critic = rsl.MLPModel(first, groups, "critic", 1, *common)
    for name, model in (("actor", actor), ("critic", critic)):
        for key, parameter in model.mlp.named_parameters():
            parameter.data.copy_(data[f"model/{name}.{key}"])
        normaliser = model.obs_normalizer
        normaliser.count.fill_(int(data["count"]))
        normaliser._mean.copy_(data["mean"])
        normaliser._var.copy_(data["variance"])
        normaliser._std.copy_(data["variance"].sqrt())
    actor.distribution.std_param.data.copy_(data["model/noise_std"])
    storage = rsl.RolloutStorage("rl", envs, steps, first, [actions], "cpu")
    return rsl.PPO(actor, critic, storage, **settings["algorithm"])


def iterate(rsl: Any, algorithm: Any, data: dict[str, Tensor]) -> dict[str, float]:
    """Fill the storage with the given actions, and update with the given permutation."""
    algorithm.train_mode()
    transition = algorithm.transition
    with torch.no_grad():
        for t, actions in enumerate(data["actions"]):
            obs = rsl.observe(data["obs"][t])
            algorithm.act(obs)  # draws actions of its own; ours take their place
            transition.actions = actions
            transition.actions_log_prob = algorithm.actor.get_output_log_prob(actions)
            flags = {"time_outs": data["time_outs"][t]}
            after = rsl.observe(data["obs"][t + 1])
            algorithm.process_env_step(after, data["rewards"][t], data["dones"][t], flags)
        algorithm.compute_returns(rsl.observe(data["obs"][-1]))
    torch.randperm = lambda *_, **__: data["permutation"]
    losses: dict[str, float] = algorithm.update()
    return losses


def results(algorithm: Any, losses: dict[str, float]) -> dict[str, Tensor]:
    """State after the iteration, by our names."""
    found: dict[str, Tensor] = {"model/noise_std": algorithm.actor.distribution.std_param.data}
    for name, model in (("actor", algorithm.actor), ("critic", algorithm.critic)):
        for key, parameter in model.mlp.named_parameters():
            found[f"model/{name}.{key}"] = parameter.data
    normaliser = algorithm.actor.obs_normalizer
    found["count"], found["mean"] = normaliser.count, normaliser._mean[0]
    found["variance"] = normaliser._var[0]
    found["learning_rate"] = torch.tensor(algorithm.learning_rate, dtype=torch.float64)
    found["advantages"] = algorithm.storage.advantages[..., 0]
    return found | {f"loss/{n}": torch.tensor(value) for n, value in losses.items()}


def main(source: Path, target: Path) -> None:
    """Read, iterate, write."""
    torch.set_num_threads(1)
    with safe_open(source, "pt") as file:
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        settings = json.loads(file.metadata()["settings"])
    rsl = load_rsl_rl()
    algorithm = build(rsl, data, settings)
    losses = iterate(rsl, algorithm, data)
    save_file({n: t.clone() for n, t in results(algorithm, losses).items()}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
