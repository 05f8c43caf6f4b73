"""Generalised advantage estimation with the bootstrap of time-outs."""

import torch
from torch import Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), ``[T, N]`` each, in the dtype of ``values``.

    ``rewards``, ``values`` and the two flags are ``[T, N]``, ``last_values`` is ``[N]``: the values
    of the observations after the last step. An episode that ran into the time limit is bootstrapped
    with the value of the observation *before* its last step; where both flags are set, termination
    wins. Inputs are not modified; N = 0 is allowed.

    Formula: Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", 2016, eq. 16; the time-out rule is that of RSL-RL.
    """
    dtype = values.dtype
    timed_out = truncated.bool() & ~terminated.bool()
    goes_on = (~(terminated.bool() | truncated.bool())).to(dtype)
    bootstrapped = rewards + gamma * values * timed_out.to(dtype)
    next_values = torch.cat([values[1:], last_values[None]])
    deltas = bootstrapped + gamma * goes_on * next_values - values
    decay = gamma * lam * goes_on
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(last_values)
    for t in reversed(range(deltas.shape[0])):
        advantage = torch.addcmul(deltas[t], decay[t], advantage, out=advantages[t])
    return advantages, advantages + values


def with_final_values(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
) -> Tensor:
    """Rewards ``[T, N]`` with which `compute_gae` bootstraps a time-out by ``final_values`` ``[T, N]``,
    the values of the true last observations, where it would take ``values``."""
    timed_out = truncated.bool() & ~terminated.bool()
    return torch.where(timed_out, rewards + gamma * (final_values - values), rewards)
