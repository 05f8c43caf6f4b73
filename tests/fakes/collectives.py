"""Ranks as threads of one process: collectives in lock-step, with exact float64 sums."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from rallypoint.trainer.errors import GroupBroken

T = TypeVar("T")
_WAIT_S = 60.0
"""Bound of a wait for the other ranks."""


class LockStepGroup:
    """A world of W ranks. `run` gives each its own thread and its own `LockStepRank`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.slots: list[tuple[str, Tensor]] = [("", torch.zeros(0))] * world_size
        self.ranks = [LockStepRank(self, rank) for rank in range(world_size)]

    def run(self, work: Callable[["LockStepRank"], T]) -> list[T]:
        """``work`` of every rank, in rank order. When one raises, the group is broken for the others,
        as it is when a process dies, and the exception of the lowest rank that has another than
        `GroupBroken` is raised (else its `GroupBroken`)."""
        self.barrier.reset()
        with ThreadPoolExecutor(self.world_size) as pool:
            futures = [pool.submit(self._guarded, work, rank) for rank in self.ranks]
            errors = [error for f in futures if (error := f.exception(_WAIT_S)) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, GroupBroken)):
            raise error
        return [f.result() for f in futures]

    def _guarded(self, work: Callable[["LockStepRank"], T], rank: "LockStepRank") -> T:
        try:
            return work(rank)
        except BaseException:  # whatever it was, the others must not wait; it goes on up
            self.barrier.abort()
            raise


class LockStepRank:
    """The `Collectives` of one rank, and a record of what it took part in."""

    def __init__(self, group: LockStepGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.log: list[tuple[str, str, int]] = []
        """(collective, dtype, elements), in order; gradients of DDP aside."""
        self.hits: list[str] = []
        """Failpoints passed, in order."""
        self.on_hit: Callable[[str, int], None] | None = None
        """Called with a failpoint's name and how often it has been passed before."""

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        self.log.append((name, str(value.dtype), value.numel()))
        return self._exchange(name, value)

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        self.log.append((name, str(value.dtype), value.numel()))
        return value.copy_(_sum(self._exchange(name, value)))

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        total = self.all_reduce_sum(name, value)
        return lambda: total

    def replicated(self, module: nn.Module) -> nn.Module:
        """The module itself, whose gradients are averaged over ranks as they come in."""
        for name, parameter in module.named_parameters():
            hook = functools.partial(self._average, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return module

    def wait_for_gradients(self) -> None:
        return None

    def hit(self, failpoint: str) -> None:
        before = self.hits.count(failpoint)
        self.hits.append(failpoint)
        if self.on_hit is not None:
            self.on_hit(failpoint, before)

    def _average(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = _sum(self._exchange(name, parameter.grad)) / self.world_size

    def _exchange(self, name: str, value: Tensor) -> list[Tensor]:
        try:
            self._group.slots[self.rank] = (name, value.detach().clone())
            self._group.barrier.wait(_WAIT_S)
            slots = list(self._group.slots)
            self._group.barrier.wait(_WAIT_S)
        except threading.BrokenBarrierError as error:
            raise GroupBroken("another rank is gone") from error
        assert {slot[0] for slot in slots} == {name}, "ranks are in different collectives"
        return [slot[1] for slot in slots]


def _sum(values: Sequence[Tensor]) -> Tensor:
    """In rank order; the same on every rank."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
