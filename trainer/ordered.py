"""How sums over samples are made from the shares of all ranks: ``[ppo] reduction``.

``ddp``: each rank adds up its own samples, DDP and small reductions add up the ranks. Fast, and exact
up to rounding: the order of the additions depends on who holds what.

``ordered``: every sum is made of one part per env block, and the parts of all blocks are added in the
order of the blocks, by every rank alike. A part is computed from the block alone, in tensors of a fixed
shape, contiguous and aligned as fresh ones are, on one thread. So no bit depends on how blocks are
spread over ranks. It sends a gradient per block and mini-batch; for tests and debugging.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.rollout import Rollout


class Reduction(Protocol):
    """Reduces over the *shards* of all ranks: the parts of a rollout that are added up on their own.
    A rank always has at least one shard, which may be empty."""

    @property
    def module(self) -> nn.Module:
        """What the forward pass must go through."""
        ...

    def shards(self, rollout: Rollout) -> Sequence[Rollout]:
        """The shards of this rank, in the order in which all other arguments have them."""
        ...

    def gather(self, name: str, vectors: Sequence[Tensor]) -> list[Tensor]:
        """A vector per shard of this rank to those of all ranks, in the order of reduction."""
        ...

    def begin_sum(self, name: str, vectors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin to sum a float64 vector per shard over the shards of all ranks; the call waits for
        the sum."""
        ...

    def accumulate(self, losses: Callable[[], Sequence[Tensor]]) -> None:
        """Keep the gradients of losses (one per shard) on this rank, for the next `backward`. The
        forward pass is in the call."""
        ...

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Set the gradients, which must be clear but for those kept, to those of the sum of the losses
        (one per shard), kept ones included, over the shards of all ranks."""
        ...

    def pack(self, vectors: Sequence[Tensor]) -> Tensor:
        """A float64 vector per shard as one, whose size is the same on every rank."""
        ...

    def unpack(self, packed: Sequence[Tensor]) -> list[Tensor]:
        """What `pack` packed on every rank, in rank order, to vectors in the order of reduction."""
        ...


class RankReduction:
    """``ddp``: one shard per rank, in rank order. Implements `Reduction`."""

    def __init__(self, collectives: Collectives, module: nn.Module) -> None:
        self._collectives = collectives
        self.module = module

    def shards(self, rollout: Rollout) -> Sequence[Rollout]:
        return (rollout,)

    def gather(self, name: str, vectors: Sequence[Tensor]) -> list[Tensor]:
        (vector,) = vectors
        return self._collectives.all_gather(name, vector)

    def begin_sum(self, name: str, vectors: Sequence[Tensor]) -> Callable[[], Tensor]:
        (vector,) = vectors
        return self._collectives.begin_sum(name, vector)

    def accumulate(self, losses: Callable[[], Sequence[Tensor]]) -> None:
        with self._unreduced():
            (loss,) = losses()
            torch.autograd.backward(loss * self._collectives.world_size)

    def backward(self, losses: Sequence[Tensor]) -> None:
        (loss,) = losses
        torch.autograd.backward(loss * self._collectives.world_size)  # DDP averages over ranks
        self._collectives.wait_for_gradients()

    def _unreduced(self) -> AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()

    def pack(self, vectors: Sequence[Tensor]) -> Tensor:
        (vector,) = vectors
        return vector

    def unpack(self, packed: Sequence[Tensor]) -> list[Tensor]:
        return list(packed)


class BlockReduction:
    """``ordered``: one shard per env block, in the order of the blocks. Implements `Reduction`."""

    def __init__(self, collectives: Collectives, policy: nn.Module, blocks: Sequence[int]) -> None:
        """Tells all ranks who brings which blocks. Raises `TrainerError` when two bring the same."""
        self._collectives = collectives
        self.module = policy
        self._kept: list[list[Tensor]] = []
        """Gradients of each shard, by micro-batch."""
        collectives.hit("block_count")
        counts = collectives.all_gather("block_count", torch.tensor([len(blocks)]))
        self._width = max(1, *(int(count) for count in counts))
        mine = torch.full((self._width,), -1)  # no block: an empty shard, or padding
        mine[: len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        collectives.hit("blocks")
        held = torch.cat(collectives.all_gather("blocks", mine)).tolist()
        self._order = sorted((i for i, b in enumerate(held) if b >= 0), key=held.__getitem__)
        ids = [held[i] for i in self._order]
        if len(set(ids)) < len(ids):
            raise TrainerError(f"env blocks are in the rollouts of two ranks: {ids}")

    def shards(self, rollout: Rollout) -> Sequence[Rollout]:
        return rollout.by_block() or (rollout,)

    def gather(self, name: str, vectors: Sequence[Tensor]) -> list[Tensor]:
        return self.unpack(self._collectives.all_gather(name, self.pack(vectors)))

    def begin_sum(self, name: str, vectors: Sequence[Tensor]) -> Callable[[], Tensor]:
        total = _sum(self.gather(name, vectors), like=vectors[0])
        return lambda: total

    def accumulate(self, losses: Callable[[], Sequence[Tensor]]) -> None:
        self._kept.append([self._gradient(loss) for loss in losses()])

    def backward(self, losses: Sequence[Tensor]) -> None:
        parameters = list(self.module.parameters())
        parts = [*self._kept, [self._gradient(loss) for loss in losses]]
        self._kept = []
        rows = [_sum(shard, like=shard[0]) for shard in zip(*parts, strict=True)]
        total = _sum(self.gather("block_gradients", rows), like=rows[0])
        split = torch.split(total, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, split, strict=True):
            parameter.grad = part.view_as(parameter).clone()  # aligned as a fresh tensor is

    def _gradient(self, loss: Tensor) -> Tensor:
        return _flat(torch.autograd.grad(loss, list(self.module.parameters())))

    def pack(self, vectors: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(tuple(vectors))
        return nn.functional.pad(rows, (0, 0, 0, self._width - len(rows))).flatten()

    def unpack(self, packed: Sequence[Tensor]) -> list[Tensor]:
        rows = torch.cat([vector.view(self._width, -1) for vector in packed])
        return [rows[i] for i in self._order]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _sum(vectors: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """One after the other; zeros where no rank has any."""
    return functools.reduce(torch.add, vectors, torch.zeros_like(like))
