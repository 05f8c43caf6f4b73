"""Names of figures: what the trainer calls them, and the tags under which curves show them.

Tags are those of SONIC where the meaning is the same, so that its dashboards work. Every figure is a
sum over all ranks, or a mean weighted by count; one that has nothing to say is left out.
"""

from dataclasses import dataclass
from typing import Final, Literal

Scope = Literal["agreed", "global sum", "global mean", "worker", "supervisor"]
"""What a figure or metric speaks of: ``agreed``, the same fact on every node; ``global sum`` and ``global
mean`` (weighted by count), of all ranks, whichever node is asked; ``worker``, one worker of this node;
``supervisor``, this node alone."""


@dataclass(frozen=True)
class Figure:
    """A figure of the trainer."""

    name: str
    tag: str
    meaning: str
    scope: Scope = "global mean"


FIGURES: Final = (
    Figure("reward_mean", "reward_mean", "reward, mean over env steps"),
    Figure("episode_return_mean", "objective/rewards", "return, mean over episodes that ended"),
    Figure("episode_length_mean", "objective/length", "length in steps, mean over those episodes"),
    Figure("policy_loss", "loss/policy_avg", "clipped policy loss, mean over samples"),
    Figure("value_loss", "loss/value_avg", "value loss, mean over samples"),
    Figure("entropy", "loss/entropy_avg", "entropy of the policy, mean over samples"),
    Figure("kl", "policy/approxkl_avg", "KL from the policy that collected, mean over samples"),
    Figure("clip_fraction", "policy/clipfrac_avg", "samples whose ratio is out of the clip range"),
    Figure("ppo_loss", "loss/weighted_ppo_loss_avg", "all of PPO's terms, mean over samples"),
    Figure(
        "value_clip_fraction", "val/clipfrac_avg", "samples whose value moved by more than clip"
    ),
    Figure("ratio_mean", "val/ratio", "policy ratio, mean over samples"),
    Figure("ratio_var", "val/ratio_var", "its variance over samples (SONIC: over mini-batches)"),
    Figure("advantage_mean", "val/advantage_mean", "before it is standardised, over env steps"),
    Figure("advantage_std", "val/advantage_std", "its standard deviation"),
    Figure("rollout_entropy", "objective/entropy", "of the policy that collected"),
    Figure("aux_distill", "loss/aux_distill_avg", "squared distance to the teacher's action mean"),
    Figure(
        "aux_reconstruction_actor",
        "loss/aux_reconstruction_actor_avg",
        "reconstruction by the actor's encoder, mean over the samples that it drives",
    ),
    Figure(
        "aux_reconstruction_critic",
        "loss/aux_reconstruction_critic_avg",
        "reconstruction by the privileged encoder, likewise",
    ),
    Figure("aux_latent", "loss/aux_latent_avg", "distance of the latents, over the same samples"),
    Figure("aux_total", "loss/total_aux_loss_avg", "all auxiliary terms, weighted and scaled"),
    Figure("aux_total_unscaled", "loss/total_aux_loss_unscaled_avg", "the same without the scale"),
    Figure("aux_loss_scale", "aux_loss_scale", "`aux.scale`", "agreed"),
    Figure("gradient_norm", "gradient_norm", "before clipping, mean over optimiser steps"),
    Figure("skipped_steps", "skipped_steps", "mini-batches that were not finite, per rank"),
    Figure("rollout_s", "collection_time", "seconds of the rollout, mean over ranks"),
    Figure(
        "straggler_ratio",
        "straggler_ratio",
        "seconds of the slowest rollout over those of the median one, of all ranks",
        "global sum",
    ),
    Figure("update_s", "learn_time", "seconds of the update, mean over ranks"),
    Figure("learning_rate", "lr", "after the last optimiser step", "agreed"),
    Figure("noise_std", "Policy/mean_noise_std", "mean over action dimensions", "agreed"),
)
"""Figures of every job; what a task adds comes under `FOLDERS`."""
FOLDERS: Final = {"figure/": "Env/", "episode/": "Episode/"}
"""What a figure's name begins with -> what its tag begins with."""
_TAGS: Final = {figure.name: figure.tag for figure in FIGURES}


def tag(figure: str) -> str:
    """The tag of a figure; one that is not known keeps its name."""
    for folder, shown in FOLDERS.items():
        if figure.startswith(folder):
            return shown + figure.removeprefix(folder)
    return _TAGS.get(figure, figure)
