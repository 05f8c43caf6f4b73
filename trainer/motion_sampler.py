"""Adaptive motion sampling: the counters of a motion library, and the probabilities made from them.

There is one global value. What ranks saw in an iteration comes as counts of failures and env steps by
bin, whole numbers in float64, so that sums over ranks are exact in any order (below 2^53); they are
merged once, at the end of the iteration, and the probabilities stand still until then.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rallypoint.daemon.shared.config import SamplerSection
from rallypoint.trainer.envs.base import MotionLibrary
from rallypoint.trainer.sampler import (
    capped_probabilities,
    ema_failures,
    ema_sampling_probabilities,
    sampling_probabilities,
)

PRIOR: Final = 1.0
"""Failures and episodes that every bin is taken to have had before the first; not in the counters."""


class MotionSampler:
    """Counters by bin, as live tensors that are changed in place.

    Their names hold the clip, ``<clip>/failures`` and so on, ``[bins of the clip]`` each: a checkpoint
    of another library does not fit, and says which clips differ."""

    def __init__(self, section: SamplerSection, library: MotionLibrary) -> None:
        """Raises `TrainerError` when the caps cannot hold for this library."""
        self._section = section
        self._library = library
        self._lengths = torch.tensor(library.lengths, dtype=torch.float64)
        names = ["failures", "steps"]
        if section.kind == "ema":
            names.append("ema")
        if section.sonic_mean_every is not None:
            names += ["pending_failures", "pending_steps"]
        self._values = {name: torch.zeros_like(self._lengths) for name in names}
        self._pending_iterations = torch.zeros((), dtype=torch.int64)
        self.probabilities()

    def tensors(self) -> Mapping[str, Tensor]:
        """Live state, float64: env steps and failures by bin since the start of the job; with
        ``sonic_mean_every`` also what is not merged yet, and since how many iterations."""
        sizes = [len(frames) for frames in self._library.bin_frames]
        parts = {
            f"{clip}/{name}": part
            for name, values in self._values.items()
            for clip, part in zip(self._library.clips, torch.split(values, sizes), strict=True)
        }
        if self._section.sonic_mean_every is not None:
            parts["pending_iterations"] = self._pending_iterations
        return parts

    def probabilities(self) -> Tensor:
        """How often an episode starts in each bin of the library, float64 ``[B]``."""
        section, values = self._section, self._values
        match section.kind:
            case "sonic":
                p = sampling_probabilities(
                    PRIOR + values["failures"],
                    PRIOR + values["steps"] / self._lengths,
                    self._lengths,
                    uniform=section.uniform,
                    cap_ratio=section.cap_ratio,
                )
            case "ema":
                p = ema_sampling_probabilities(
                    values["ema"], values["ema"], alpha=0.0, uniform=section.uniform
                )
            case "uniform":
                p = self._lengths / self._lengths.sum()
        if section.bin_cap is None and section.clip_cap is None:
            return p
        return capped_probabilities(
            p, self._library.clip_of_bin, bin_cap=section.bin_cap, clip_cap=section.clip_cap
        )

    def merge(self, counts: Tensor, *, world_size: int) -> None:
        """Add an iteration's counts, summed over ranks: failures and env steps by bin, ``[2, B]``."""
        failures, steps = counts.to("cpu", torch.float64)
        values = self._values
        if self._section.kind == "ema":
            values["ema"].copy_(ema_failures(values["ema"], failures, alpha=self._section.alpha))
        if self._section.sonic_mean_every is None:
            values["failures"] += failures
            values["steps"] += steps
            return
        # SONIC replaces every rank's counters by their mean: an event counts 1 / world size.
        values["pending_failures"] += failures / world_size
        values["pending_steps"] += steps / world_size
        self._pending_iterations += 1
        if self._pending_iterations >= self._section.sonic_mean_every:
            for name in ("failures", "steps"):
                values[name] += values[f"pending_{name}"]
                values[f"pending_{name}"].zero_()
            self._pending_iterations.zero_()

    def failure_rates(self) -> Tensor:
        """Failures per pass through each bin, prior included, ``[B]``."""
        episodes = PRIOR + self._values["steps"] / self._lengths
        return (PRIOR + self._values["failures"]) / episodes

    def figures(self) -> dict[str, float]:
        """What operators see of it."""
        p, values = self.probabilities(), self._values
        rate = self.failure_rates()
        by_frames = self._lengths / self._lengths.sum()
        return {
            "adp_samp/entropy": -torch.special.xlogy(p, p).sum().item(),
            "adp_samp/max_probability": p.max().item(),
            "adp_samp/max_over_uniform": (p / by_frames).max().item(),
            "adp_samp/failure_rate_mean": rate.mean().item(),
            "adp_samp/failure_rate_max": rate.max().item(),
            "adp_samp/failures": values["failures"].sum().item(),
        }
