"""Where other trainers keep what: the names in their ``.pt`` files, and ours.

RSL-RL 5 keeps actor and critic apart; up to version 4 they are one module, and up to 2 the statistics of
observations lie beside it. SONIC keeps policy and value function apart, as does Holosoma.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

_MLP: Final = r"(?:\w+\.)*?(\d+\.(?:weight|bias))"


@dataclass(frozen=True)
class Rule:
    """A name within one dictionary of the file, and what it is here."""

    pattern: str
    target: str
    """``actor`` and ``critic`` for a layer, ``noise_std``, ``log_std``, or a part of a statistic:
    ``actor/mean``, ``actor/var``, ``actor/count``, and the same of the critic's."""


def _statistics(network: str, prefix: str, mean: str, var: str) -> tuple[Rule, ...]:
    names = {"mean": mean, "var": var, "count": "count"}
    return tuple(
        Rule(re.escape(prefix + name), f"{network}/{part}") for part, name in names.items()
    )


def _noise(prefix: str = "") -> tuple[Rule, ...]:
    return (
        Rule(rf"{prefix}(?:std|std_param)", "noise_std"),
        Rule(rf"{prefix}(?:log_std|log_std_param)", "log_std"),
    )


_SONIC_POLICY: Final = (
    Rule(rf"actor_module\.{_MLP}", "actor"),
    *_noise(),
    *_statistics("actor", "running_mean_std.", "running_mean", "running_var"),
)
_SONIC_VALUE: Final = (
    Rule(rf"critic_module\.{_MLP}", "critic"),
    *_statistics("critic", "running_mean_std.", "running_mean", "running_var"),
)

LAYOUTS: Final[Mapping[str, Mapping[str, tuple[Rule, ...]]]] = {
    "RSL-RL 5": {
        "actor_state_dict": (
            Rule(rf"mlp\.{_MLP}", "actor"),
            *_noise(r"distribution\."),
            *_statistics("actor", "obs_normalizer.", "_mean", "_var"),
        ),
        "critic_state_dict": (
            Rule(rf"mlp\.{_MLP}", "critic"),
            *_statistics("critic", "obs_normalizer.", "_mean", "_var"),
        ),
    },
    "RSL-RL": {
        "model_state_dict": (
            Rule(rf"actor\.{_MLP}", "actor"),
            Rule(rf"critic\.{_MLP}", "critic"),
            *_noise(),
            *_statistics("actor", "actor_obs_normalizer.", "_mean", "_var"),
            *_statistics("critic", "critic_obs_normalizer.", "_mean", "_var"),
        ),
        "obs_norm_state_dict": _statistics("actor", "", "_mean", "_var"),
        "privileged_obs_norm_state_dict": _statistics("critic", "", "_mean", "_var"),
        "critic_obs_norm_state_dict": _statistics("critic", "", "_mean", "_var"),
    },
    "SONIC": {
        "policy_state_dict": _SONIC_POLICY,
        "actor_model_state_dict": _SONIC_POLICY,
        "value_state_dict": _SONIC_VALUE,
        "critic_model_state_dict": _SONIC_VALUE,
    },
}
"""By trainer: the dictionaries of its files that are looked into."""


@dataclass(frozen=True)
class Mapped:
    """A file, read by a layout."""

    layout: str
    tensors: Mapping[str, Tensor]
    """By target; layers as ``actor.0.weight``."""
    names: Mapping[str, str]
    """For each of them where it was in the file."""
    left: tuple[str, ...]
    """What the file has beside them, and nobody wants."""


def read(content: Mapping[str, Any]) -> Mapped | None:
    """Map a file by the layout that fits it; None when its names are nobody's."""
    mapped = [_map(name, layout, content) for name, layout in LAYOUTS.items()]
    best = max(mapped, key=lambda found: len(found.tensors))
    return best if any(name.startswith("actor.") for name in best.tensors) else None


def _map(name: str, layout: Mapping[str, tuple[Rule, ...]], content: Mapping[str, Any]) -> Mapped:
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    left: list[str] = []
    for key, value in content.items():
        if key not in layout or not isinstance(value, Mapping):
            left.append(str(key))
            continue
        for inner, tensor in value.items():
            target = _target(layout[key], str(inner)) if isinstance(tensor, Tensor) else None
            if target is None or target in tensors:
                left.append(f"{key}/{inner}")
            else:
                tensors[target], names[target] = tensor, f"{key}/{inner}"
    return Mapped(name, tensors, names, tuple(left))


def _target(rules: tuple[Rule, ...], name: str) -> str | None:
    for rule in rules:
        match = re.fullmatch(rule.pattern, name)
        if match:
            return f"{rule.target}.{match[1]}" if match.groups() else rule.target
    return None
