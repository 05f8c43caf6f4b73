"""Activations that are faster on CPU than torch's own."""

from typing import Any

import torch
from torch import Tensor, nn


class Elu(nn.Module):
    """``x`` above 0 and ``exp(x) - 1`` below, as `torch.nn.ELU`.

    On CPU that one takes ``expm1``, which costs seven times as much as ``exp``. The difference is in the
    rounding of 1: at most 6e-8 of the output in float32, no more than in the sums that follow.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, fresh."""
        if x.device.type != "cpu":
            return nn.functional.elu(x)
        if not torch.is_grad_enabled():
            return _cpu_elu(x)
        out: Tensor = _CpuElu.apply(x)  # type: ignore[no-untyped-call]
        return out


def _cpu_elu(x: Tensor) -> Tensor:
    out = x.clamp(max=0).exp_().sub_(1)
    return torch.maximum(x, out, out=out)  # below 0, x is the smaller one


class _CpuElu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = _cpu_elu(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        (gradient,) = gradients
        slope: Tensor = torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, True, out)
        return slope
