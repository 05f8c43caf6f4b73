"""Profiles: the choices of two public PPO trainers, each as a set of values and nothing more.

The values rank above the defaults of the schema and below a task's overrides, a file, the environment
and the command line. Every profile sets the same keys: those in which the two trainers differ, or
differ from the schema.
"""

from types import MappingProxyType
from typing import Any, Final

PROFILES: Final[MappingProxyType[str, MappingProxyType[str, Any]]] = MappingProxyType(
    {
        # SONIC's release configuration. Its permutation per rank is replaced by one per env block,
        # which is the same for every world size.
        "sonic": MappingProxyType(
            {
                "env.budget": "per_rank",
                "ppo.rollout_steps": 24,
                "ppo.advantage_scope": "global",
                "ppo.advantage_ddof": 1,
                "ppo.mini_batch_of": "trajectories",
                "ppo.permutation_scope": "block",
                "ppo.permutation_every": "epoch",
                "ppo.learning_rate": 2e-5,
                "ppo.learning_rate_bounds": (1e-5, 2e-4),
                "ppo.learning_rate_decision": "each_rank",
                "ppo.kl_form": "sonic",
                "ppo.max_grad_norm": 0.1,
                "ppo.grad_clip": "joint",
                "ppo.value_loss": "clipped",
                "ppo.time_out_bootstrap": "pre_step",
                "ppo.entropy_coef": 0.01,
                "ppo.hidden": (2048, 2048, 1024, 1024, 512, 512),
                "ppo.critic_hidden": (2048, 2048, 1024, 1024, 512, 512),
                "ppo.activation": "silu",
                "ppo.noise": "std",
                "ppo.init_std": 0.05,
                "ppo.std_bounds": (0.001, 0.5),
                "ppo.std_clamp": "in_place",
                "ppo.normalise_actor": False,
                "ppo.normalise_critic": True,
                "ppo.normaliser_form": "variance",
                "ppo.normaliser_clip": 5.0,
                "ppo.normaliser_prior": 1,
            }
        ),
        # RSL-RL 5.5.1.
        "rsl_rl": MappingProxyType(
            {
                "env.budget": "per_rank",
                "ppo.rollout_steps": 24,
                "ppo.advantage_scope": "per_rank",
                "ppo.advantage_ddof": 1,
                "ppo.mini_batch_of": "transitions",
                "ppo.permutation_scope": "rank",
                "ppo.permutation_every": "iteration",
                "ppo.learning_rate": 1e-3,
                "ppo.learning_rate_bounds": (1e-5, 1e-2),
                "ppo.learning_rate_decision": "rank_0",
                "ppo.kl_form": "exact",
                "ppo.max_grad_norm": 1.0,
                "ppo.grad_clip": "separate",
                "ppo.value_loss": "clipped",
                "ppo.time_out_bootstrap": "pre_step",
                "ppo.entropy_coef": 0.01,
                "ppo.hidden": (256, 256, 256),
                "ppo.critic_hidden": (256, 256, 256),
                "ppo.activation": "elu",
                "ppo.noise": "std",
                "ppo.init_std": 1.0,
                "ppo.std_bounds": (1e-6, 1e6),
                "ppo.std_clamp": "forward",
                "ppo.normalise_actor": False,
                "ppo.normalise_critic": False,
                "ppo.normaliser_form": "std",
                "ppo.normaliser_clip": None,
                "ppo.normaliser_prior": 0,
            }
        ),
    }
)
"""``profile -> {"section.key": value}``; the profiles named here are the ones that exist."""
