"""RSL-RL's agent file (``agent.yaml``) in our words: ``rallypoint config --from-rsl-rl``.

Two layouts are read: ``policy`` with both networks (RSL-RL 2 and 3), and ``actor`` and ``critic`` apart
(4 and 5). What has no place here is listed with the reason, and never dropped in silence.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.errors import ConfigError

_ACTIVATIONS: Final = ("elu", "silu", "relu", "tanh")
_NOISE: Final = {"scalar": "std", "log": "log_std"}
_SAME: Final[Mapping[str, str]] = MappingProxyType(
    {
        "seed": "job.seed",
        "max_iterations": "job.iterations",
        "num_steps_per_env": "ppo.rollout_steps",
        "save_interval": "checkpoint.every_iterations",
        "wandb_project": "curves.wandb_project",
        "algorithm.num_learning_epochs": "ppo.epochs",
        "algorithm.num_mini_batches": "ppo.mini_batches",
        "algorithm.learning_rate": "ppo.learning_rate",
        "algorithm.gamma": "ppo.gamma",
        "algorithm.lam": "ppo.lam",
        "algorithm.entropy_coef": "ppo.entropy_coef",
        "algorithm.max_grad_norm": "ppo.max_grad_norm",
        "algorithm.value_loss_coef": "ppo.value_coef",
        "algorithm.clip_param": "ppo.clip",
        "policy.init_noise_std": "ppo.init_std",
        "policy.actor_hidden_dims": "ppo.hidden",
        "policy.critic_hidden_dims": "ppo.critic_hidden",
        "policy.actor_obs_normalization": "ppo.normalise_actor",
        "policy.critic_obs_normalization": "ppo.normalise_critic",
        "actor.hidden_dims": "ppo.hidden",
        "actor.obs_normalization": "ppo.normalise_actor",
        "actor.init_noise_std": "ppo.init_std",
        "actor.distribution_cfg.init_std": "ppo.init_std",
        "actor.distribution_cfg.std_range": "ppo.std_bounds",
        "critic.hidden_dims": "ppo.critic_hidden",
        "critic.obs_normalization": "ppo.normalise_critic",
    }
)
"""What is the same value under another name."""
_EXPECTED: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "class_name": "OnPolicyRunner",
        "algorithm.class_name": "PPO",
        "algorithm.optimizer": "adam",
        "policy.class_name": "ActorCritic",
        "actor.class_name": "MLPModel",
        "critic.class_name": "MLPModel",
        "actor.stochastic": True,
        "actor.distribution_cfg.class_name": "GaussianDistribution",
        "actor.distribution_cfg.learn_std": True,
        "logger": "tensorboard",
        "load_run": ".*",
        "load_checkpoint": "model_.*.pt",
    }
)
"""What is so here in any case; another value is not mapped."""
_WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "device": "the device of a slot is node.devices",
        "obs_groups": "which observations are the actor's and the critic's is the env's affair",
        "clip_actions": "the env clips; some say so as their action bound",
        "experiment_name": "no name of a job (letters, digits, dot, dash, underscore): job.name",
        "run_name": "a run is its directory: rallypoint run --dir",
        "resume": "a job goes on by itself when it is started on its directory",
        "load_run": "rallypoint import, then run --warm-start",
        "load_checkpoint": "rallypoint import, then run --warm-start",
        "logger": "curves go to TensorBoard's files; others are not fed",
        "algorithm.rnd_cfg": "there is no curiosity yet",
        "algorithm.symmetry_cfg": "there is no symmetry yet",
        "algorithm.class_name": "PPO only; for a teacher see distill.teacher",
        "policy.class_name": "networks without memory only",
        "policy.activation": "elu, silu, relu or tanh",
        "actor.activation": "elu, silu, relu or tanh",
        "policy.noise_std_type": "scalar or log",
        "actor.noise_std_type": "scalar or log",
        "actor.distribution_cfg.std_type": "scalar or log",
        "critic.activation": "both networks have that of the actor",
    }
)
_NOTHING: Final[tuple[Any, ...]] = (None, "", False, [], {})
"""Values by which nothing is asked for."""


@dataclass
class Converted:
    """Our values by ``section.key``, and what was left out, with the reason."""

    values: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def read(path: Path) -> dict[str, Any]:
    """The file as plain values; tags of Python objects, as simulators write them, are read as what is
    below them. Raises `ConfigError` when it cannot be read, or is no RSL-RL agent file."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Makes no objects."""

    def plain(loader: Any, _: str, node: Any) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return node.value

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", plain)
    try:
        document = yaml.load(path.read_text(), Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if isinstance(document, dict) and isinstance(document.get("runner"), dict):
        document = document["runner"]
    if not isinstance(document, dict) or not isinstance(document.get("algorithm"), dict):
        raise ConfigError(f"{path}: no agent file of RSL-RL: it has no section 'algorithm'")
    return document


def convert(document: Mapping[str, Any]) -> Converted:
    """RSL-RL's values in our words."""
    found = Converted()
    every = dict(_leaves(document))
    for name, value in every.items():
        special = _SPECIAL.get(name)
        if special is not None and special(found, value, every):
            continue
        if name in _SAME and value is not None:
            found.values[_SAME[name]] = value
        elif value not in _NOTHING and _EXPECTED.get(name) != value:
            found.left_out[name] = _WHY.get(name, "there is no such thing here")
    _set_block(found)
    return found


def text(path: Path) -> str:
    """A job file with the values of this agent file, and what is not in it, as comments. Raises
    `ConfigError` when the file cannot be read, or its values cannot stand here."""
    document = read(path)
    found = convert(document)
    given = [configload.Given("job.profile", "rsl_rl", str(path))]
    given += [
        configload.Given(key, "none" if value is None else value, str(path))
        for key, value in found.values.items()
    ]
    configload.load(command_line=given)
    lines = [f"# from {path.name} of RSL-RL; what it does not say is as in RSL-RL (profile)"]
    sections = ("job", "env", "ppo", "checkpoint", "curves")
    for section in sections:
        keys = sorted(key for key in found.values if key.startswith(f"{section}."))
        if keys or section == "job":
            lines += ["", f"[{section}]"]
        if section == "job":
            lines.append('profile = "rsl_rl"')
        lines += [f"{key.partition('.')[2]} = {_toml(found.values[key])}" for key in keys]
    if found.left_out:
        leaves = dict(_leaves(document))
        lines += ["", "# not mapped:"]
        lines += [f"#   {n} = {_toml(leaves[n])}: {why}" for n, why in found.left_out.items()]
    return "\n".join(lines)


def _leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted name; ``obs_groups`` and extensions are one value each."""
    whole = ("obs_groups", "algorithm.rnd_cfg", "algorithm.symmetry_cfg")
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in whole:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _toml(value: Any) -> str:
    return '"none"' if value is None else msgspec.json.encode(value).decode()


# --- values that are more than another name -------------------------------------------------------

_Special = Callable[[Converted, Any, Mapping[str, Any]], bool]
"""Whether the value was mapped."""


def _schedule(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    if value == "fixed":
        found.values["ppo.desired_kl"] = None
    return value in ("fixed", "adaptive")


def _desired_kl(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    if every.get("algorithm.schedule") != "fixed":
        found.values["ppo.desired_kl"] = value
    return True


def _value_loss(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    found.values["ppo.value_loss"] = "clipped" if value else "squared"
    return True


def _advantages(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    found.values["ppo.advantage_scope"] = "mini_batch" if value else "per_rank"
    return True


def _normalisation(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    for key in ("ppo.normalise_actor", "ppo.normalise_critic"):
        found.values.setdefault(key, bool(value))
    return True


def _noise(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    if value in _NOISE:
        found.values["ppo.noise"] = _NOISE[value]
    return value in _NOISE


def _activation(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    if value in _ACTIVATIONS:
        found.values["ppo.activation"] = value
    return value in _ACTIVATIONS


def _critic_activation(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    return bool(value == every.get("actor.activation"))


def _name(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    fits = isinstance(value, str) and configload.is_name(value)
    if fits:
        found.values["job.name"] = value
    return fits


def _logger(found: Converted, value: Any, every: Mapping[str, Any]) -> bool:
    if value == "wandb":
        found.values["curves.wandb"] = True
    return bool(value == "wandb")


def _set_block(found: Converted) -> None:
    """Env blocks must be a multiple of 8 and of the mini-batches."""
    mini_batches = found.values.get("ppo.mini_batches", 4)
    if isinstance(mini_batches, int) and mini_batches > 0 and 8 % mini_batches:
        block = math.lcm(8, mini_batches)
        found.values |= {"env.block": block, "env.num_envs": 16 * block}


_SPECIAL: Final[Mapping[str, _Special]] = MappingProxyType(
    {
        "experiment_name": _name,
        "logger": _logger,
        "empirical_normalization": _normalisation,
        "algorithm.schedule": _schedule,
        "algorithm.desired_kl": _desired_kl,
        "algorithm.use_clipped_value_loss": _value_loss,
        "algorithm.normalize_advantage_per_mini_batch": _advantages,
        "policy.noise_std_type": _noise,
        "policy.activation": _activation,
        "actor.noise_std_type": _noise,
        "actor.activation": _activation,
        "actor.distribution_cfg.std_type": _noise,
        "critic.activation": _critic_activation,
    }
)
