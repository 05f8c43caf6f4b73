"""The deployed policy: from raw observations to the actions that the env applies, in one module."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rallypoint.trainer.activations import Elu
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.latent import LatentActor
from rallypoint.trainer.networks import ActorCritic
from rallypoint.trainer.normaliser import Scaling


class DeployedPolicy(nn.Module):
    """Normalisation of the actor's observations, the mean of the policy, and the bounds of actions.
    All parts are plain layers on the CPU, in single precision."""

    mean: Tensor
    inverse_scale: Tensor

    def __init__(self, network: ActorCritic, scaling: Scaling, action_bound: float | None) -> None:
        """A copy of what acts in ``network``. Raises `TrainerError` for layers that are not known."""
        super().__init__()
        self.layers = nn.Sequential(*(_plain(layer) for layer in _acting(network)))
        self.inputs, self.outputs = self._sizes()
        self.normalised = "actor" in scaling.by_network
        self.clip = scaling.clip if self.normalised else None
        self.action_bound = action_bound
        mean, inverse_scale = torch.zeros(self.inputs), torch.ones(self.inputs)
        if self.normalised:
            mean, inverse_scale = scaling.by_network["actor"]
        self.register_buffer("mean", mean.detach().cpu().float())
        self.register_buffer("inverse_scale", inverse_scale.detach().cpu().float())
        self.requires_grad_(False)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions ``[B, A]`` for raw observations ``[B, D]`` of the group ``actor``."""
        x = obs
        if self.normalised:
            x = (x - self.mean) * self.inverse_scale
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        x = self.layers(x)
        if self.action_bound is not None:
            x = x.clamp(-self.action_bound, self.action_bound)
        action: Tensor = x
        return action

    def _sizes(self) -> tuple[int, int]:
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        return linear[0].in_features, linear[-1].out_features


def _acting(network: ActorCritic) -> Sequence[nn.Module]:
    """Layers from normalised observations to action means."""
    actor = network.actor
    parts = (actor.encoder, actor.action) if isinstance(actor, LatentActor) else (actor,)
    layers: list[nn.Module] = []
    for part in parts:
        if not isinstance(part, nn.Sequential):
            raise TrainerError(
                f"a policy of {type(part).__name__} cannot be taken apart into layers"
            )
        layers += part
    return layers


def _plain(layer: nn.Module) -> nn.Module:
    """A copy that every exporter knows."""
    if isinstance(layer, nn.Linear):
        copy = nn.Linear(layer.in_features, layer.out_features)
        with torch.no_grad():
            copy.weight.copy_(layer.weight)
            copy.bias.copy_(layer.bias)
        return copy
    if isinstance(layer, Elu | nn.ELU):
        return nn.ELU()
    if isinstance(layer, nn.SiLU | nn.ReLU | nn.Tanh):
        return type(layer)()
    raise TrainerError(f"a policy with a layer {type(layer).__name__} cannot be exported")
