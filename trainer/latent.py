"""A policy through a latent, with two encoders, and the auxiliary losses that shape it.

One encoder sees what the actor sees, the other what the critic sees (the same group in tasks with one).
In a share of the envs the privileged encoder drives the policy. Losses, each a mean over the samples
of its own population over all ranks: both reconstruct what they see, and where the privileged encoder
drives, the two latents are drawn together. Only the actor's encoder is needed to act.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import AuxSection, PpoSection
from rallypoint.trainer.networks import ActorCritic, activation_of, critic_group, mlp

TERMS: Final = ("aux_reconstruction_actor", "aux_reconstruction_critic", "aux_latent")
"""Figures of the losses, in the order of `LatentActorCritic.forward`'s last output."""


def coefficients(aux: AuxSection) -> tuple[float, ...]:
    """Weight of each of `TERMS` in the loss, without the common scale."""
    return aux.reconstruction_coef, aux.reconstruction_coef, aux.latent_coef


def totals(aux: AuxSection, figures: Mapping[str, float]) -> dict[str, float]:
    """Figures of all terms together; one without a sample anywhere adds nothing."""
    terms = zip(TERMS, coefficients(aux), strict=True)
    total = sum(coefficient * figures.get(name, 0.0) for name, coefficient in terms)
    return {
        "aux_total": aux.scale * total,
        "aux_total_unscaled": total,
        "aux_loss_scale": aux.scale,
    }


def populations(privileged: Tensor) -> Tensor:
    """Which samples each of `TERMS` is about, ``[B, 3]`` bool."""
    return torch.stack([~privileged, privileged, privileged], -1)


class LatentActor(nn.Module):
    """Encoders, the decoder of actions, and the decoders that reconstruct."""

    def __init__(
        self, obs_dims: Mapping[str, int], action_dim: int, config: PpoSection, latent: int
    ) -> None:
        super().__init__()
        activation, hidden = activation_of(config), config.hidden
        seen = obs_dims["actor"], obs_dims[critic_group(obs_dims)]
        self.encoder = mlp(seen[0], hidden, latent, activation)
        self.privileged_encoder = mlp(seen[1], hidden, latent, activation)
        self.action = mlp(latent, hidden, action_dim, activation)
        self.reconstruction = mlp(latent, hidden, seen[0], activation)
        self.privileged_reconstruction = mlp(latent, hidden, seen[1], activation)

    def forward(self, actor_obs: Tensor) -> Tensor:
        """Action means ``[B, A]`` by the actor's own encoder."""
        mean: Tensor = self.action(self.encoder(actor_obs))
        return mean


class LatentActorCritic(ActorCritic):
    """`ActorCritic` whose actor is a `LatentActor`."""

    def __init__(
        self, obs_dims: Mapping[str, int], action_dim: int, config: PpoSection, latent: int
    ) -> None:
        super().__init__(
            obs_dims, action_dim, config, LatentActor(obs_dims, action_dim, config, latent)
        )

    def privileged_mean(self, critic_obs: Tensor) -> Tensor:
        """Action means ``[B, A]`` by the privileged encoder."""
        actor: LatentActor = self.actor  # type: ignore[assignment]
        return self._run(nn.Sequential(actor.privileged_encoder, actor.action), critic_obs)

    def forward(  # type: ignore[override]
        self, actor_obs: Tensor, critic_obs: Tensor, privileged: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ActorCritic.forward`; the samples in which the privileged encoder drives are ``[B]`` bool.
        Last the losses of every sample, ``[B, 3]``, whatever its population: so every parameter is in
        the graph of every rank."""
        actor: LatentActor = self.actor  # type: ignore[assignment]
        own = self._run(actor.encoder, actor_obs)
        other = self._run(actor.privileged_encoder, critic_obs)
        mean = self._run(actor.action, torch.where(privileged[:, None], other, own))
        losses = (
            (self._run(actor.reconstruction, own) - actor_obs).square().mean(-1),
            (self._run(actor.privileged_reconstruction, other) - critic_obs).square().mean(-1),
            (own - other).square().mean(-1),
        )
        return mean, self.std(), self.value(critic_obs), torch.stack(losses, -1)
