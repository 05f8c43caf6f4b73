"""A plain PPO in one process, to compare the trainer with: short, and obviously right.

It uses nothing of the trainer but the env. What must be common for two runs to be comparable is handed
in: first parameters, action noise, and the order in which each env block deals its envs.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.envs.base import VecEnv


@dataclass(frozen=True)
class Draws:
    """The random numbers of a run."""

    noise: Callable[[int], Tensor]
    """Iteration -> standard normal, ``[T, N, A]``."""
    order: Callable[[int, int], Tensor]
    """(iteration, epoch) -> a permutation of each block's envs, ``[blocks, block size]``."""


class ReferencePpo:
    """Float64; a Gaussian policy with free log standard deviations; the env sees every action."""

    def __init__(
        self, env: VecEnv, start: Mapping[str, Tensor], draws: Draws, ppo: PpoSection
    ) -> None:
        self.env, self.draws, self.ppo = env, draws, ppo
        obs, actions = env.spec.obs_dims["actor"], env.spec.action_dim
        self.actor, self.critic = mlp(obs, ppo.hidden, actions), mlp(obs, ppo.hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(actions, dtype=torch.float64))
        for name, parameter in self.parameters().items():
            parameter.data.copy_(start[name])
        self.optimiser = torch.optim.Adam(self.parameters().values(), lr=ppo.learning_rate)
        self.learning_rates: list[float] = []
        self.seen = [torch.zeros(0, obs, dtype=torch.float64)]

    def parameters(self) -> dict[str, nn.Parameter]:
        nets = {"actor": self.actor, "critic": self.critic}
        named = {f"{n}.{key}": p for n, net in nets.items() for key, p in net.named_parameters()}
        return named | {"log_std": self.log_std}

    def iterate(self, iteration: int) -> None:
        """Collect, update, and only then look at the new observations' statistics."""
        ppo, noise = self.ppo, self.draws.noise(iteration)
        raw, actions, log_probs, means, rewards, over, timed_out = [], [], [], [], [], [], []
        obs = self.env.begin_rollout(iteration)["actor"]
        std = self.log_std.detach().exp()
        for t in range(ppo.rollout_steps):
            mean = self.actor(self.scaled(obs)).detach()
            action = mean + std * noise[t]
            result = self.env.step(action)
            raw.append(obs)
            means.append(mean)
            actions.append(action)
            log_probs.append(log_prob(action, mean, std))
            rewards.append(result.reward)
            over.append(result.terminated | result.truncated)
            timed_out.append(result.truncated & ~result.terminated)
            obs = result.obs["actor"]
        values = [self.critic(self.scaled(x)).detach()[:, 0] for x in [*raw, obs]]

        advantages: list[Tensor] = []
        following = torch.zeros_like(values[0])
        for t in reversed(range(ppo.rollout_steps)):
            goes_on = 1.0 - over[t].double()
            reward = rewards[t] + ppo.gamma * values[t] * timed_out[t]
            delta = reward + ppo.gamma * goes_on * values[t + 1] - values[t]
            following = delta + ppo.gamma * ppo.lam * goes_on * following
            advantages.insert(0, following)
        advantage, value = torch.stack(advantages), torch.stack(values[:-1])
        returns = advantage + value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        inputs = self.scaled(torch.stack(raw))
        data = (inputs, torch.stack(actions), torch.stack(means), torch.stack(log_probs))
        for epoch in range(ppo.epochs):
            order = self.draws.order(iteration, epoch)
            blocks, size = order.shape
            share = size // ppo.mini_batches
            for m in range(ppo.mini_batches):
                dealt = order[:, m * share : (m + 1) * share] + size * torch.arange(blocks)[:, None]
                chosen = dealt.flatten()
                batch = [x[:, chosen].flatten(0, 1) for x in (*data, value, advantage, returns)]
                self.step(batch, std)
        self.seen.append(torch.cat(raw))

    def step(self, batch: list[Tensor], std_old: Tensor) -> None:
        """One mini-batch, one step."""
        ppo = self.ppo
        obs, action, mean_old, log_prob_old, value_old, advantage, returns = batch
        mean, std, value = self.actor(obs), self.log_std.exp(), self.critic(obs)[:, 0]
        ratio = (log_prob(action, mean, std) - log_prob_old).exp()
        clipped = ratio.clamp(1 - ppo.clip, 1 + ppo.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_near = value_old + (value - value_old).clamp(-ppo.clip, ppo.clip)
        value_loss = torch.max((value - returns) ** 2, (value_near - returns) ** 2).mean()
        entropy = (0.5 * math.log(2 * math.pi * math.e) + std.log()).sum()
        loss = policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * entropy
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        gradients = [p.grad for p in self.parameters().values() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        if ppo.max_grad_norm is not None and norm > ppo.max_grad_norm:
            for gradient in gradients:
                gradient *= ppo.max_grad_norm / (norm + 1e-6)
        self.adapt(mean_old, std_old, mean.detach(), std.detach())
        self.optimiser.step()
        with torch.no_grad():
            self.log_std.clamp_(math.log(ppo.std_bounds[0]), math.log(ppo.std_bounds[1]))

    def adapt(self, mean_old: Tensor, std_old: Tensor, mean: Tensor, std: Tensor) -> None:
        """The learning rate of this step, by the KL of the policy from the one that collected."""
        assert self.ppo.desired_kl is not None
        offset = 1e-5 if self.ppo.kl_form == "sonic" else 0.0
        moved = (std_old**2 + (mean_old - mean) ** 2) / (2 * std**2) - 0.5
        kl = ((std / std_old + offset).log() + moved).sum(-1).mean().item()
        group, (low, high) = self.optimiser.param_groups[0], self.ppo.learning_rate_bounds
        if kl > 2 * self.ppo.desired_kl:
            group["lr"] = max(group["lr"] / 1.5, low)
        elif 0 < kl < self.ppo.desired_kl / 2:
            group["lr"] = min(group["lr"] * 1.5, high)
        self.learning_rates.append(group["lr"])

    def scaled(self, obs: Tensor) -> Tensor:
        """Normalised by all observations of earlier iterations."""
        known, ours = torch.cat(self.seen), self.ppo.normaliser_prior
        count = len(known) + ours
        mean = torch.zeros(obs.shape[-1], dtype=torch.float64)
        variance = mean + 1
        if count >= 2:
            mean = known.sum(0) / count
            variance = (((known - mean) ** 2).sum(0) + ours * (1 + mean**2)) / count
        return ((obs - mean) / (variance + 1e-5).sqrt()).clamp(-5, 5)


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    widths = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ELU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs)).double()


def log_prob(action: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    density = -0.5 * ((action - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    return density.sum(-1)
