"""What the algorithm needs from the process group, and nothing else."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn


class Collectives(Protocol):
    """Collectives of the present generation. Order never depends on data; every rank takes part in
    every one, also with nothing to contribute. Any of them may raise `GroupBroken`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        """The value of every rank, in rank order; shape and dtype are the same on all."""
        ...

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        """Sum over ranks, in place; float64 or int64."""
        ...

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        """Begin `all_reduce_sum`; the call waits for its end and gives the sum. Others may be begun
        and ended meanwhile, in the same order on every rank."""
        ...

    def replicated(self, module: nn.Module) -> nn.Module:
        """The module wrapped so that gradients are averaged over ranks in backward (DDP)."""
        ...

    def wait_for_gradients(self) -> None:
        """Wait until the reductions that backward of the wrapped module has begun are over."""
        ...

    def hit(self, failpoint: str) -> None:
        """A named point for fault injection, inert unless armed."""
        ...


class SingleProcess:
    """Collectives of a world of one, without a process group: evaluation, tests, `reproduce`."""

    rank = 0
    world_size = 1

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        return [value.clone()]

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        return value

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        return lambda: value

    def replicated(self, module: nn.Module) -> nn.Module:
        return module

    def wait_for_gradients(self) -> None:
        return None

    def hit(self, failpoint: str) -> None:
        return None
