"""What one rank collects in one iteration, and the loop that collects it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rallypoint.trainer.envs.base import EnvSpec, StepResult, VecEnv
from rallypoint.trainer.episodes import ENDING, Ended, EpisodeTracker
from rallypoint.trainer.errors import EnvError
from rallypoint.trainer.latent import LatentActorCritic
from rallypoint.trainer.losses import gaussian_log_prob
from rallypoint.trainer.networks import ActorCritic, critic_group
from rallypoint.trainer.normaliser import Normaliser, Scaling
from rallypoint.trainer.statistics import Moments

LEAST_ROWS = 16
"""Fewer rows go through a network together with rows of zeros. On CPU a row of a product does not
depend on the others of its batch, if batches are multiples of 8 and not 8 alone: a matrix library may
take another path for those. So a rollout does not depend on how env blocks are spread over ranks."""
MOST_ROWS = 8192
"""Most rows of one pass of the critic over a rollout, so that its activations stay small."""


@dataclass(frozen=True)
class Rollout:
    """T steps of N envs under one policy version. N = 0 is a rank that brings nothing."""

    env_ids: NDArray[np.int64]
    """Global ids, ascending, ``[N]``; whole env blocks."""
    block: int
    """Envs per env block."""
    actor_obs: Tensor
    """Normalised with the statistics of the iteration before, ``[T, N, D]``."""
    critic_obs: Tensor
    """Likewise; the same tensor as ``actor_obs`` where critic and actor see the same."""
    actions: Tensor
    """``[T, N, A]``."""
    mean: Tensor
    """Action means of the policy that collected, ``[T, N, A]``."""
    std: Tensor
    """Its standard deviations, ``[A]``."""
    log_prob: Tensor
    """Log density of the actions under it, ``[T, N]``."""
    values: Tensor
    """``[T, N]``."""
    last_values: Tensor
    """Values of the observations after the last step, ``[N]``."""
    final_values: Tensor | None
    """Values of the observations that episodes ended with, ``[T, N]``; what stands where none ended is
    of no use. None: time-outs are bootstrapped by ``values``."""
    rewards: Tensor
    """``[T, N]``."""
    terminated: Tensor
    """``[T, N]`` bool."""
    truncated: Tensor
    """``[T, N]`` bool."""
    obs_moments: Mapping[str, Moments]
    """Per normalised observation group: moments of the raw observations, each counted once."""
    episode_rows: Tensor
    """Which env each of the episodes that ended in it belongs to, as an index into ``env_ids``, int64
    ``[K]``."""
    episode_returns: Tensor
    """Their undiscounted returns, float64 ``[K]``."""
    episode_lengths: Tensor
    """Their lengths in steps, float64 ``[K]``."""
    episode_terms: Mapping[str, Tensor]
    """Sums of each term of the reward over the same episodes, float64 ``[K]``, by name; and what is
    known of them as they end, by names that begin with `ENDING`."""
    figures: Mapping[str, Tensor]
    """Sums over the steps of the figures that the env gives, float64 ``[N]``, by name."""
    raw_actor_obs: Tensor | None = None
    """``actor_obs`` before they are normalised, where they were asked for."""
    raw_critic_obs: Tensor | None = None
    """Likewise; None also where both see the same group."""
    bins: Tensor | None = None
    """Bin of the motion library that each step was in, int64 ``[T, N]``; None for other tasks."""
    privileged: Tensor | None = None
    """Where the privileged encoder drove the policy, ``[T, N]`` bool. None: there is none."""
    labels: Tensor | None = None
    """Action means of a teacher in the same states, ``[T, N, A]``. None: there is no teacher."""
    block_moments: tuple[Mapping[str, Moments], ...] = ()
    """``obs_moments`` of each env block alone, where they were asked for."""

    @property
    def env_steps(self) -> int:
        """T * N."""
        return self.rewards.numel()

    @property
    def step_fields(self) -> tuple[str, ...]:
        """Names of the tensors that are ``[T, N, ...]`` and are there, but for ``critic_obs``."""
        return tuple(name for name in _STEP_FIELDS if getattr(self, name) is not None)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Ids of the env blocks, ascending."""
        return tuple((self.env_ids[:: self.block] // self.block).tolist())

    def by_block(self) -> tuple["Rollout", ...]:
        """A rollout for each env block, in contiguous tensors of its own. ``block_moments`` must have
        been asked for."""
        return tuple(
            self._part(i * self.block, moments) for i, moments in enumerate(self.block_moments)
        )

    def _part(self, start: int, moments: Mapping[str, Moments]) -> "Rollout":
        rows = slice(start, start + self.block)
        ended = (self.episode_rows >= rows.start) & (self.episode_rows < rows.stop)
        cut = {name: getattr(self, name)[:, rows].contiguous() for name in self.step_fields}
        same = self.critic_obs is self.actor_obs
        critic_obs = cut["actor_obs"] if same else self.critic_obs[:, rows].contiguous()
        return replace(
            self,
            env_ids=self.env_ids[rows],
            critic_obs=critic_obs,
            last_values=self.last_values[rows].clone(),
            obs_moments=moments,
            episode_rows=self.episode_rows[ended] - start,
            episode_returns=self.episode_returns[ended],
            episode_lengths=self.episode_lengths[ended],
            episode_terms={name: sums[ended] for name, sums in self.episode_terms.items()},
            figures={name: sums[rows].clone() for name, sums in self.figures.items()},
            block_moments=(moments,),
            **cut,
        )


def join(first: Rollout, second: Rollout) -> Rollout:
    """Two rollouts of one policy version with different env blocks as one."""
    ids = np.concatenate([first.env_ids, second.env_ids])
    order = np.argsort(ids)
    index = torch.from_numpy(order).to(first.rewards.device)

    def both(name: str, dim: int) -> Tensor:
        parts = [getattr(first, name), getattr(second, name)]
        return torch.cat(parts, dim).index_select(dim, index.to(parts[0].device))

    joined: dict[str, Any] = {name: both(name, 1) for name in first.step_fields}
    same = first.critic_obs is first.actor_obs
    moments = (*first.block_moments, *second.block_moments)
    by_block = sorted(
        zip((*first.blocks, *second.blocks), moments, strict=False), key=lambda x: x[0]
    )
    rows = torch.cat([first.episode_rows, second.episode_rows + len(first.env_ids)])
    return replace(
        first,
        env_ids=ids[order],
        critic_obs=joined["actor_obs"] if same else both("critic_obs", 1),
        last_values=both("last_values", 0),
        obs_moments={g: m.merge(second.obs_moments[g]) for g, m in first.obs_moments.items()},
        episode_rows=torch.argsort(index)[rows],
        episode_returns=torch.cat([first.episode_returns, second.episode_returns]),
        episode_lengths=torch.cat([first.episode_lengths, second.episode_lengths]),
        episode_terms={
            name: torch.cat([sums, second.episode_terms[name]])
            for name, sums in first.episode_terms.items()
        },
        figures={
            name: torch.cat([sums, second.figures[name]])[index.to(sums.device)]
            for name, sums in first.figures.items()
        },
        block_moments=tuple(moments for _, moments in by_block),
        **joined,
    )


_STEP_FIELDS: Final = (
    "actor_obs",
    "actions",
    "mean",
    "log_prob",
    "values",
    "rewards",
    "terminated",
    "truncated",
    "final_values",
    "raw_actor_obs",
    "raw_critic_obs",
    "bins",
    "labels",
    "privileged",
)
"""Tensors of a rollout that are ``[T, N, ...]``, the critic's observations aside."""


@dataclass(frozen=True)
class Advice:
    """A teacher beside the policy."""

    label: Callable[[Tensor], Tensor]
    """Its action means ``[N, A]`` for raw observations of the actor's group ``[N, D]``."""
    acts: Tensor
    """Envs in which it also acts, ``[N]`` bool."""


@dataclass(frozen=True)
class _Steps:
    """What the loop gathers: T entries each, and one more of the observations."""

    obs: list[dict[str, Tensor]]
    means: list[Tensor]
    actions: list[Tensor]
    results: list[StepResult]
    episodes: list[Ended]
    labels: list[Tensor]


@torch.no_grad()
def collect(
    policy: ActorCritic,
    normaliser: Normaliser,
    tracker: EpisodeTracker,
    env: VecEnv,
    noise: Tensor,
    *,
    iteration: int,
    block: int,
    block_moments: bool,
    final_obs: bool,
    raw_obs: bool,
    advice: Advice | None,
    privileged: Tensor | None,
    on_step: Callable[[int], None],
) -> Rollout:
    """Run ``env`` for T steps with the action noise ``[T, N, A]``, whose dtype and device are those
    of the rollout; ``on_step(t)`` is called after each step. With ``final_obs`` the rollout has
    ``final_values``, with ``raw_obs`` what it says, with ``advice`` ``labels``; in the envs ``privileged``
    ``[N]`` the privileged encoder drives. Raises `EnvError` when the env breaks its contract."""
    scaling = normaliser.scaling(noise.dtype)
    std = policy.std()
    steps = _Steps([_like(noise, env.begin_rollout(iteration))], [], [], [], [], [])
    for t in range(noise.shape[0]):
        mean = _by_rows(policy.mean, scaling.apply("actor", steps.obs[t]["actor"]))
        if privileged is not None and isinstance(policy, LatentActorCritic):
            seen = scaling.apply("critic", steps.obs[t][critic_group(env.spec.obs_dims)])
            other = _by_rows(policy.privileged_mean, seen)
            mean = torch.where(privileged[:, None], other, mean)
        acting = mean
        if advice is not None:
            label = _by_rows(advice.label, steps.obs[t]["actor"])
            steps.labels.append(label)
            acting = torch.where(advice.acts[:, None], label, mean)
        actions = torch.addcmul(acting, std, noise[t])
        result = env.step(actions)
        reward = result.reward.to(noise.device)
        done = (result.terminated | result.truncated).to(noise.device)
        steps.means.append(mean)
        steps.actions.append(actions)
        steps.results.append(result)
        steps.obs.append(_like(noise, result.obs))
        terms = result.reward_terms | {ENDING + name: x for name, x in result.endings.items()}
        steps.episodes.append(tracker.step(reward, done, terms))
        on_step(t)
    final = _final_values(policy, scaling, env, steps, noise) if final_obs else None
    rollout = _assemble(policy, scaling, env, steps, noise, block, final)
    if privileged is not None:
        rollout = replace(rollout, privileged=privileged.expand(noise.shape[0], -1))
    if raw_obs:
        groups = ("actor", critic_group(env.spec.obs_dims))
        actor, critic = (torch.stack([obs[g] for obs in steps.obs[:-1]]) for g in groups)
        same = groups[0] == groups[1]
        rollout = replace(rollout, raw_actor_obs=actor, raw_critic_obs=None if same else critic)
    return rollout if not block_moments else _with_block_moments(rollout, scaling, steps)


def _with_block_moments(rollout: Rollout, scaling: Scaling, steps: _Steps) -> Rollout:
    groups = {g: torch.stack([obs[g] for obs in steps.obs[:-1]]) for g in scaling.groups}
    parts = {g: torch.split(raw, rollout.block, dim=1) for g, raw in groups.items()}
    count = len(rollout.blocks)
    by_block = [{g: _obs_moments(parts[g][b]) for g in parts} for b in range(count)]
    return replace(rollout, block_moments=tuple(by_block))


def _final_values(
    policy: ActorCritic, scaling: Scaling, env: VecEnv, steps: _Steps, like: Tensor
) -> Tensor:
    critic = critic_group(env.spec.obs_dims)
    final = []
    for result in steps.results:
        if result.final_obs is None:
            raise EnvError(
                f"task {env.spec.task!r} gives no final observations, which ppo.time_out_bootstrap = "
                "'final_obs' needs; take 'pre_step'"
            )
        final.append(result.final_obs[critic].to(like))
    return _values(policy, scaling.apply("critic", torch.stack(final)))


def _values(policy: ActorCritic, critic_obs: Tensor) -> Tensor:
    """Values ``[T, N]``, in few large passes."""
    chunks = torch.split(critic_obs.flatten(0, 1), MOST_ROWS)
    return torch.cat([_by_rows(policy.value, c) for c in chunks]).view(critic_obs.shape[:2])


def _assemble(
    policy: ActorCritic,
    scaling: Scaling,
    env: VecEnv,
    steps: _Steps,
    like: Tensor,
    block: int,
    final_values: Tensor | None,
) -> Rollout:
    """Stack the steps, and compute their values."""
    critic = critic_group(env.spec.obs_dims)
    raw = {g: torch.stack([obs[g] for obs in steps.obs]) for g in dict.fromkeys(("actor", critic))}
    seen = scaling.apply("actor", raw["actor"])
    if critic == "actor" and scaling.alike:
        critic_seen = seen
    else:
        critic_seen = scaling.apply("critic", raw[critic])
    values = _values(policy, critic_seen)
    actions, mean = torch.stack(steps.actions), torch.stack(steps.means)
    std = policy.std()
    actor_obs, results = seen[:-1], steps.results
    episodes = steps.episodes
    terminated = torch.stack([r.terminated for r in results]).to(like.device)
    truncated = torch.stack([r.truncated for r in results]).to(like.device)
    return Rollout(
        env_ids=env.env_ids.copy(),
        block=block,
        actor_obs=actor_obs,
        critic_obs=actor_obs if critic_seen is seen else critic_seen[:-1],
        actions=actions,
        mean=mean,
        std=std,
        log_prob=gaussian_log_prob(actions, mean, std),
        values=values[:-1],
        last_values=values[-1],
        final_values=final_values,
        rewards=torch.stack([r.reward for r in results]).to(like),
        terminated=terminated,
        truncated=truncated,
        obs_moments={g: _obs_moments(raw[g][:-1]) for g in scaling.groups},
        episode_rows=(terminated | truncated).nonzero()[:, 1],
        episode_returns=torch.cat([ended.returns for ended in episodes]),
        episode_lengths=torch.cat([ended.lengths for ended in episodes]),
        episode_terms={
            name: torch.cat([ended.terms[name] for ended in episodes]) for name in episodes[0].terms
        },
        figures=_figure_sums(env.spec, results),
        labels=torch.stack(steps.labels) if steps.labels else None,
        bins=_stacked_bins(results),
    )


def _by_rows(network: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    count = rows.shape[0]
    if count >= LEAST_ROWS:
        return network(rows)
    return network(nn.functional.pad(rows, (0, 0, 0, LEAST_ROWS - count)))[:count]


def _obs_moments(obs: Tensor) -> Moments:
    """Of raw observations ``[T, N, D]``."""
    return Moments.of(obs.contiguous().flatten(0, 1))


def _stacked_bins(results: Sequence[StepResult]) -> Tensor | None:
    bins = [r.bins for r in results if r.bins is not None]
    return torch.stack(bins) if bins else None


def _figure_sums(spec: EnvSpec, results: Sequence[StepResult]) -> dict[str, Tensor]:
    """Sums over steps ``[N]`` by figure, in a fixed order. Raises `EnvError` when names change between steps."""
    names = sorted(results[0].figures)
    for result in results:
        if sorted(result.figures) != names:
            raise EnvError(
                f"task {spec.task!r} gave the figures {names} in one step of a rollout and "
                f"{sorted(result.figures)} in another; they must be the same on every step"
            )
    # Step by step: a reduction over the whole could add in another order for another N.
    return {n: functools.reduce(torch.add, [r.figures[n] for r in results]) for n in names}


def _like(like: Tensor, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {group: tensor.to(like) for group, tensor in obs.items()}
