"""What is known about a task without building it: its named overrides over the profile.

A task overrides nets, learning rate, bounds and noise, so that it learns well without a
configuration file. The values rank below a file, the environment and the command line.
"""

from types import MappingProxyType
from typing import Any, Final

_SMALL: Final[dict[str, Any]] = {
    "ppo.critic_hidden": None,
    "ppo.activation": "elu",
    "ppo.learning_rate": 1e-3,
    "ppo.learning_rate_bounds": (1e-5, 1e-2),
    "ppo.kl_form": "exact",
    "ppo.max_grad_norm": 1.0,
    "ppo.noise": "log_std",
    "ppo.init_std": 1.0,
    "ppo.std_bounds": (0.05, 2.0),
    "ppo.std_clamp": "in_place",
    "ppo.normalise_actor": True,
    "ppo.normalise_critic": True,
}
"""For tasks that small nets learn in minutes: the profiles' values are made for large ones."""

TASK_OVERRIDES: Final[MappingProxyType[str, MappingProxyType[str, Any]]] = MappingProxyType(
    {
        "quadruped-velocity": MappingProxyType(
            {
                **_SMALL,
                "ppo.hidden": (128, 128),
                "ppo.entropy_coef": 0.002,
                "job.iterations": 400,
            }
        ),
        "humanoid-track": MappingProxyType(
            {
                **_SMALL,
                "ppo.hidden": (128, 128),
                "ppo.init_std": 0.3,
                "ppo.desired_kl": 0.03,
                "ppo.gamma": 0.98,
                "ppo.entropy_coef": 0.0,
                "job.iterations": 400,
            }
        ),
        "cartpole": MappingProxyType(
            {
                **_SMALL,
                "ppo.hidden": (32, 32),
                "ppo.learning_rate_bounds": (1e-5, 1e-3),
                "ppo.entropy_coef": 0.0,
            }
        ),
        "pointmass": MappingProxyType({**_SMALL, "ppo.hidden": (32, 32), "ppo.entropy_coef": 0.0}),
    }
)
"""``task -> {"section.key": value}``; the tasks named here are the ones that exist."""
