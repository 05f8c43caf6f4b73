"""Running sums of the episodes in progress, and what is known of those that ended."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TERM: Final = "term/"
ENDING: Final = "ending/"
"""Begins the name of a term that is no part of the reward: 0 in every step but an episode's last one, so
that its sum is what that said (`StepResult.endings`)."""


class Ended(NamedTuple):
    """Episodes that one step ended, float64 ``[K]`` each."""

    returns: Tensor
    lengths: Tensor
    terms: dict[str, Tensor]
    """Sums of each term of the reward."""


class EpisodeTracker:
    """Running return, length and reward terms of the present episode of every env, keyed by global
    env id."""

    def __init__(self, device: torch.device) -> None:
        self.env_ids = np.zeros(0, dtype=np.int64)
        self._returns = torch.zeros(0, dtype=torch.float64, device=device)
        self._lengths = self._returns.clone()
        self._terms: dict[str, Tensor] = {}

    def assign(self, env_ids: NDArray[np.int64]) -> None:
        """Own exactly these envs: those that stay keep their sums, new ones start at zero."""
        _, now, before = np.intersect1d(env_ids, self.env_ids, return_indices=True)
        returns, lengths = self._returns, self._lengths
        self._returns = returns.new_zeros(len(env_ids))
        self._lengths = lengths.new_zeros(len(env_ids))
        self._returns[now] = returns[before]
        self._lengths[now] = lengths[before]
        for name, sums in self._terms.items():
            self._terms[name] = sums.new_zeros(len(env_ids))
            self._terms[name][now] = sums[before]
        self.env_ids = env_ids.copy()

    def rows(self) -> dict[str, Tensor]:
        """Copies of the sums, ``[N]`` each, in the order of ``env_ids``."""
        terms = {f"{_TERM}{name}": sums.clone() for name, sums in self._terms.items()}
        return {"returns": self._returns.clone(), "lengths": self._lengths.clone(), **terms}

    def load_rows(self, env_ids: NDArray[np.int64], rows: Mapping[str, Tensor]) -> None:
        """Put what `rows` gave into these envs, which are owned."""
        where = torch.from_numpy(np.searchsorted(self.env_ids, env_ids)).to(self._returns.device)
        self._returns[where] = rows["returns"].to(self._returns)
        self._lengths[where] = rows["lengths"].to(self._lengths)
        for name in (name for name in rows if name.startswith(_TERM)):
            self._term(name.removeprefix(_TERM))[where] = rows[name].to(self._returns)

    def _term(self, name: str) -> Tensor:
        """Running sums of a term of the reward, ``[N]``; zeros where it is new."""
        return self._terms.setdefault(name, torch.zeros_like(self._returns))

    def step(self, reward: Tensor, done: Tensor, terms: Mapping[str, Tensor]) -> Ended:
        """Add a step ``[N]``; what is known of the episodes that it ended."""
        self._returns += reward
        self._lengths += 1
        for name, term in terms.items():
            self._term(name).add_(term.to(self._returns))
        sums = (self._returns, self._lengths, *self._terms.values())
        ended = done.nonzero()[:, 0]
        returns, lengths, *of_terms = (x.index_select(0, ended) for x in sums)
        if len(ended):
            for x in sums:
                x.index_fill_(0, ended, 0.0)
        return Ended(returns, lengths, dict(zip(self._terms, of_terms, strict=True)))
