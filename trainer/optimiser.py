"""Adam with state that exists from the start and is written in place.

Kingma and Ba, "Adam: a method for stochastic optimisation", 2015; the arithmetic is torch's fused
kernel, called as it is. `torch.optim.Adam` makes its state at the first step and importing its base
class loads the compiler stack (about a second and 70 MB a worker); its functional form sorts the same
tensors by device and type at every step, which takes longer than the step of a small policy.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8


class Adam:
    """The optimiser of all parameters, with one learning rate."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float
    ) -> None:
        self._parameters = dict(parameters)
        self._mean = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._square = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        device = next(iter(self._parameters.values())).device
        self._steps = torch.zeros(len(self._parameters), dtype=torch.float32, device=device)
        self._learning_rate = torch.tensor(learning_rate, dtype=torch.float64)
        self._operands = (list(self._mean.values()), list(self._square.values()))
        self._steps_of_each = list(self._steps.unbind())  # views

    @property
    def learning_rate(self) -> float:
        """The present learning rate, part of the state."""
        return self._learning_rate.item()

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate.fill_(value)

    def tensors(self) -> Mapping[str, Tensor]:
        """Live state: moments per parameter, steps taken ``[P]`` (float32 as the kernel wants it:
        exact below 2^24 steps), and the learning rate (float64)."""
        return {
            "learning_rate": self._learning_rate,
            "steps": self._steps,
            **{f"exp_avg/{name}": tensor for name, tensor in self._mean.items()},
            **{f"exp_avg_sq/{name}": tensor for name, tensor in self._square.items()},
        }

    def gradients(self) -> list[Tensor]:
        """The gradients, in parameter order. Raises RuntimeError for a parameter without one."""
        return [_gradient(name, p) for name, p in self._parameters.items()]

    def clear_gradients(self) -> None:
        """Forget the gradients, also those of a step that was broken off."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step along the present gradients."""
        self._steps += 1
        torch._fused_adam_(
            list(self._parameters.values()),
            self.gradients(),
            *self._operands,
            [],
            self._steps_of_each,
            lr=self.learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(
            f"parameter {name!r} got no gradient: every parameter must enter the loss, on an empty "
            "rank too, or DDP would wait for it forever"
        )
    return parameter.grad
