"""Env rows from one node to another, at the beginning of a generation and before a checkpoint.

On one node rows are found in the files of its slots. Where a plan gives an env block to a worker of
another node, a rank of the node that has its rows sends them to all, and the new owner keeps them in
files of its own node. The same brings the rows of all envs to rank 0's node before it commits a
checkpoint that holds them. Only generations of several nodes run these collectives.
"""

from collections.abc import Callable, Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rallypoint.checkpointing import tensorfile
from rallypoint.trainer.elastic.collectives import Collectives
from rallypoint.trainer.elastic.rowsfile import ENV_IDS, Rows, RowsFiles

Keep = Callable[[str, int, NDArray[np.int64], Rows], None]
"""Writes rows of a safe point (lineage, iteration) of these envs."""


def exchange(
    collectives: Collectives,
    files: RowsFiles,
    lineage: str,
    iteration: int,
    wanted: Collection[int],
    keep: Keep,
    *,
    blocks: int,
    size: int,
) -> None:
    """Bring the rows of this safe point of the ``wanted`` env blocks (of 0 … ``blocks`` - 1, ``size``
    envs each) to this node, as far as any node has them: ``keep`` writes what came."""
    every = np.arange(blocks * size, dtype=np.int64)
    ids, rows = files.find(lineage, iteration, every)
    here = set((ids // size).tolist())
    lacking = {b for b in wanted if b not in here}
    marks = torch.zeros(2, blocks, dtype=torch.uint8)
    marks[0, sorted(lacking)] = 1
    marks[1, sorted(here)] = 1
    collectives.hit("rows_wanted")
    by_rank = torch.stack(collectives.all_gather("rows_wanted", marks))
    someone_lacks, has = by_rank[:, 0].any(0), by_rank[:, 1]
    first = has.argmax(0)  # the lowest rank that has it
    sends = someone_lacks & has.any(0) & (first == collectives.rank)
    mine = torch.from_numpy(np.isin(ids // size, sends.nonzero()[:, 0].numpy()))
    sent = {name: tensor[mine] for name, tensor in rows.items()}
    packed = _pack({**sent, ENV_IDS: torch.from_numpy(ids)[mine]})
    collectives.hit("rows_bytes")
    lengths = [int(n) for n in collectives.all_gather("rows_bytes", torch.tensor([len(packed)]))]
    padded = nn.functional.pad(packed, (0, max(lengths) - len(packed)))
    received: list[dict[str, Tensor]] = []
    collectives.hit("rows")
    for part, length in zip(collectives.all_gather("rows", padded), lengths, strict=True):
        tensors = tensorfile.parse(part[:length].clone(), "env rows of another rank")
        kept = torch.from_numpy(np.isin(tensors[ENV_IDS].numpy() // size, sorted(lacking)))
        if kept.any():
            received.append({name: tensor[kept] for name, tensor in tensors.items()})
    if received:
        joined = {name: torch.cat([part[name] for part in received]) for name in received[0]}
        keep(lineage, iteration, joined.pop(ENV_IDS).numpy(), joined)


def _pack(tensors: dict[str, Tensor]) -> Tensor:
    data = bytearray(b"".join(tensorfile.stream(tensors)))
    return torch.frombuffer(data, dtype=torch.uint8)
