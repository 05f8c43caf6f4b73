"""Formulas of adaptive motion sampling: how often each bin of a motion library starts an episode.

A *bin* is a fixed run of frames of one clip. All values are float64; inputs are never modified; sums
are over all bins of the library, so that every rank computes the same bits from the same counters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rallypoint.trainer.errors import TrainerError

_CAP_SLACK = 1e-12


def sampling_probabilities(
    failures: Tensor,
    episodes: Tensor,
    bin_lengths: Tensor,
    *,
    uniform: float,
    cap_ratio: float,
) -> Tensor:
    """SONIC's probabilities of bins ``[B]``.

    ``failures`` and ``episodes`` include their prior of 1 each; an env step adds 1 / bin length to the
    episodes of its bin. The failure rate is cut at ``cap_ratio`` times its mean, ``1 - uniform`` of the
    mass goes by it, the rest is spread evenly; then each bin is weighted by its length in frames."""
    rate = _float64(failures) / _float64(episodes)
    rate = rate.minimum(cap_ratio * rate.mean())
    even = torch.full_like(rate, 1.0 / rate.numel())
    total = rate.sum()
    by_rate = rate / total if total > 0 else even
    weighted = ((1.0 - uniform) * by_rate + uniform * even) * _float64(bin_lengths)
    return weighted / weighted.sum()


def ema_failures(previous: Tensor, failures: Tensor, *, alpha: float) -> Tensor:
    """mjlab's running failure counts ``[B]``: ``(1 - alpha) * previous + alpha * failures``."""
    return (1.0 - alpha) * _float64(previous) + alpha * _float64(failures)


def ema_sampling_probabilities(
    previous: Tensor, failures: Tensor, *, alpha: float, uniform: float
) -> Tensor:
    """mjlab's probabilities of bins ``[B]`` (smoothing kernel of size 1) after an update of the
    running counts ``previous`` with ``failures``: counts plus ``uniform`` / B, normalised."""
    counts = ema_failures(previous, failures, alpha=alpha)
    raised = counts + uniform / counts.numel()
    return raised / raised.sum()


def capped_probabilities(
    probabilities: Tensor,
    clip_of_bin: Sequence[int],
    *,
    bin_cap: float | None,
    clip_cap: float | None,
) -> Tensor:
    """The probabilities with no bin above ``bin_cap`` and no clip's sum above ``clip_cap``; strict:
    what is cut goes to the others in proportion, so that the caps hold after normalisation.

    ``clip_of_bin`` has the clip, from 0, of each bin. Raises `TrainerError` when both cannot hold with
    a sum of 1."""
    p = _float64(probabilities)
    clips = torch.as_tensor(clip_of_bin, dtype=torch.int64, device=p.device)
    sizes = torch.bincount(clips).to(torch.float64)
    most_bin = 1.0 if bin_cap is None else bin_cap
    # What a clip can hold: its own cap, or all of its bins at theirs.
    most_clip = (sizes * most_bin).clamp(max=1.0 if clip_cap is None else clip_cap)
    if most_clip.sum() < 1.0 - _CAP_SLACK:
        raise TrainerError(
            f"sampler.bin_cap = {bin_cap} and sampler.clip_cap = {clip_cap} leave only "
            f"{most_clip.sum().item():.3g} of the probability for {len(sizes)} clips with "
            f"{p.numel()} bins; raise them"
        )
    totals = _fill(torch.zeros_like(most_clip).index_add_(0, clips, p), most_clip, 1.0)
    result = torch.empty_like(p)
    for clip, total in enumerate(totals.tolist()):
        bins = clips == clip
        result[bins] = _fill(p[bins], torch.full_like(p[bins], most_bin), total)
    return result


def _fill(weights: Tensor, caps: Tensor, total: float) -> Tensor:
    """Shares of ``total`` in proportion to ``weights``, none above its cap; the caps can hold it."""
    full = torch.zeros_like(caps, dtype=torch.bool)
    while True:
        # Without weight to go by, what is left is spread in proportion to the caps.
        base = weights if weights[~full].sum() > 0 else caps
        rest = total - caps[full].sum()
        shares = torch.where(full, caps, base * (rest / base[~full].sum()))
        over = ~full & (shares > caps)
        if not over.any():
            return torch.minimum(shares, caps)
        full |= over


def _float64(values: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)
