"""Policy and value networks."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import PpoSection


def critic_group(obs_dims: Mapping[str, int]) -> str:
    """The observation group that the critic sees."""
    return "critic" if "critic" in obs_dims else "actor"


class ActorCritic(nn.Module):
    """A Gaussian policy with free standard deviations, and a value function.

    There are no buffers: statistics live in the state registry, so that DDP has nothing to broadcast.
    """

    def __init__(self, obs_dims: Mapping[str, int], action_dim: int, config: PpoSection) -> None:
        super().__init__()
        self._log_std_bounds = tuple(math.log(bound) for bound in config.std_bounds)
        self.actor = _mlp(obs_dims["actor"], config.hidden, action_dim)
        self.critic = _mlp(obs_dims[critic_group(obs_dims)], config.hidden, 1)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(config.init_std)))
        self.clamp_std()

    def forward(self, actor_obs: Tensor, critic_obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Action mean ``[B, A]``, standard deviation ``[A]`` and value ``[B]`` for normalised
        observations ``[B, D]``; one call for policy and value together, as DDP needs it."""
        return self.mean(actor_obs), self.std(), self.value(critic_obs)

    def mean(self, actor_obs: Tensor) -> Tensor:
        """Action mean ``[B, A]``."""
        mean: Tensor = self.actor(actor_obs)
        return mean

    def std(self) -> Tensor:
        """Standard deviation of the action noise, ``[A]``."""
        return self.log_std.exp()

    def value(self, critic_obs: Tensor) -> Tensor:
        """Value ``[B]``."""
        value: Tensor = self.critic(critic_obs)
        return value.squeeze(-1)

    def clamp_std(self) -> None:
        """Put the standard deviations back into their bounds; to be called after each optimiser
        step. (A clamp in the forward pass would cut the gradient, and so never let go again.)"""
        low, high = self._log_std_bounds
        with torch.no_grad():
            self.log_std.clamp_(low, high)


def _mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ELU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
