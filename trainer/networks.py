"""Policy and value networks."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.activations import Elu

ACTIVATIONS: Final[Mapping[str, type[nn.Module]]] = {
    "elu": Elu,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
"""What ``[ppo] activation`` names."""


def critic_group(obs_dims: Mapping[str, int]) -> str:
    """The observation group that the critic sees."""
    return "critic" if "critic" in obs_dims else "actor"


class ActorCritic(nn.Module):
    """A Gaussian policy with free standard deviations, and a value function.

    There are no buffers: statistics live in the state registry, so that DDP has nothing to broadcast.
    The free parameter of the noise is ``log_std`` or ``noise_std``, ``[A]``, as configured.
    """

    def __init__(
        self,
        obs_dims: Mapping[str, int],
        action_dim: int,
        config: PpoSection,
        actor: nn.Module | None = None,
    ) -> None:
        """``actor`` takes the place of the usual network from observations to means."""
        super().__init__()
        critic_hidden = config.hidden if config.critic_hidden is None else config.critic_hidden
        activation = activation_of(config)
        self.actor = actor or mlp(obs_dims["actor"], config.hidden, action_dim, activation)
        self.critic = mlp(obs_dims[critic_group(obs_dims)], critic_hidden, 1, activation)
        self._log = config.noise == "log_std"
        self._clamp_in_forward = config.std_clamp == "forward"
        low, high = config.std_bounds
        self._bounds = (math.log(low), math.log(high)) if self._log else (low, high)
        start = math.log(config.init_std) if self._log else config.init_std
        free = nn.Parameter(torch.full((action_dim,), start))
        self.register_parameter("log_std" if self._log else "noise_std", free)
        self.clamp_std()
        self._autocast = config.autocast is not None
        if config.compile is not None:
            for network in (self.actor, self.critic):  # in place: names of parameters stay
                network.compile(backend=config.compile, dynamic=True)

    def forward(self, actor_obs: Tensor, critic_obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Action mean ``[B, A]``, standard deviation ``[A]`` and value ``[B]`` for normalised
        observations ``[B, D]``; one call for policy and value together, as DDP needs it."""
        return self.mean(actor_obs), self.std(), self.value(critic_obs)

    def mean(self, actor_obs: Tensor) -> Tensor:
        """Action mean ``[B, A]``."""
        return self._run(self.actor, actor_obs)

    def std(self) -> Tensor:
        """Standard deviation of the action noise, ``[A]``."""
        free: Tensor = self.free_noise()
        if self._clamp_in_forward:
            free = free.clamp(*self._bounds)
        return free.exp() if self._log else free.clone()

    def free_noise(self) -> nn.Parameter:
        """The free parameter of the action noise, ``[A]``."""
        return self.get_parameter("log_std" if self._log else "noise_std")

    def value(self, critic_obs: Tensor) -> Tensor:
        """Value ``[B]``."""
        return self._run(self.critic, critic_obs).squeeze(-1)

    def _run(self, network: nn.Module, obs: Tensor) -> Tensor:
        out: Tensor
        if not self._autocast:
            out = network(obs)
            return out
        with torch.autocast(obs.device.type, torch.bfloat16):
            out = network(obs)
        return out.to(obs.dtype)

    def clamp_std(self) -> None:
        """Put the free parameter back into its bounds, unless the forward pass clamps it; to be called
        after each optimiser step. (A clamp in the forward pass cuts the gradient, and so never lets go
        again.)"""
        if not self._clamp_in_forward:
            with torch.no_grad():
                self.free_noise().clamp_(*self._bounds)

    def clip_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the policy (its noise among them) and of the critic."""
        return [*self.actor.parameters(), self.free_noise()], list(self.critic.parameters())


def activation_of(config: PpoSection) -> type[nn.Module]:
    """The activation of all hidden layers."""
    activation = ACTIVATIONS[config.activation]
    if config.compile is not None and activation is Elu:
        return nn.ELU  # a compiler makes its own of that, and cannot look into ours
    return activation


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, activation: type[nn.Module]
) -> nn.Sequential:
    """Linear layers with an activation after each hidden one."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
