"""What is known about a task without building it: its named overrides over the defaults.

A task overrides nets, learning rate, bounds and noise, so that it learns well without a
configuration file. The values rank below a file, the environment and the command line.
"""

from types import MappingProxyType
from typing import Any, Final

TASK_OVERRIDES: Final[MappingProxyType[str, MappingProxyType[str, Any]]] = MappingProxyType(
    {
        "quadruped-velocity": MappingProxyType(
            {
                "ppo.hidden": (128, 128),
                "ppo.init_std": 1.0,
                "ppo.learning_rate": 1e-3,
                "ppo.learning_rate_bounds": (1e-5, 1e-2),
                "ppo.entropy_coef": 0.002,
                "job.iterations": 400,
            }
        ),
        "cartpole": MappingProxyType(
            {
                "ppo.hidden": (32, 32),
                "ppo.learning_rate_bounds": (1e-5, 1e-3),
                "ppo.entropy_coef": 0.0,
            }
        ),
        "pointmass": MappingProxyType({"ppo.hidden": (32, 32), "ppo.entropy_coef": 0.0}),
    }
)
"""``task -> {"section.key": value}``; the tasks named here are the ones that exist."""
