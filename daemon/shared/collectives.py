"""Every collective that a job ever runs, in one table: printed, measured, and checked by tests.

Their order and number never depend on data, and every rank takes part in each, also with nothing to
contribute. A collective that does not stand here cannot be run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import msgspec

from rallypoint.daemon.shared.config import Config

When = Literal["forming", "iteration", "mini_batch", "end"]
WHEN: Final[dict[When, str]] = {
    "forming": "once a generation",
    "iteration": "once an iteration",
    "mini_batch": "E·M times an iteration",
    "end": "at the end of the job",
}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the sizes of collectives depend on; `rallypoint.trainer.sizes` finds them for a job."""

    parameters_bytes: int
    """All parameters that are trained, and so all gradients of one mini-batch."""
    state_bytes: int
    """The shared state: parameters, optimiser, statistics, counters."""
    record_values: int
    """Length R of the learner's float64 record."""
    header_bytes: int
    """What precedes the record in the last collective."""
    mini_batches: int
    """E·M: mini-batches of one iteration."""
    moment_values: int = 0
    """Numbers in the moments of a mini-batch's observations, where they are gathered."""
    latent: bool = False
    """Whether there are auxiliary losses (``aux.latent``)."""
    rank_blocks: int = 0
    """K: most env blocks that one rank brings, at the greatest world size."""
    job_blocks: int = 0
    """Env blocks of the whole job, with a global budget."""
    block_rows_bytes: int = 0
    """Rows of the envs of one block."""


@dataclass(frozen=True)
class Collective:
    """One collective."""

    name: str
    when: When
    operation: Literal["all-gather", "sum", "mean", "broadcast"]
    dtype: str
    """Number type; ``parameters`` is that of ``ppo.dtype``."""
    size: str
    """Bytes that one rank puts in, in words."""
    size_bytes: Callable[[Sizes], int]
    """The same as a number; of ``gradients`` all buckets of one mini-batch."""
    meaning: str

    def calls(self, sizes: Sizes) -> int:
        """How often in one iteration (gradients: how many mini-batches); never, if it has no size."""
        if not self.size_bytes(sizes):
            return 0
        return {"iteration": 1, "mini_batch": sizes.mini_batches}.get(self.when, 0)

    def result_bytes(self, sizes: Sizes, world_size: int) -> int:
        """Bytes that one rank holds afterwards: a gather brings those of every rank."""
        ranks = world_size if self.operation == "all-gather" else 1
        return ranks * self.size_bytes(sizes)


TABLE: Final = (
    Collective(
        *("who_is_where", "forming", "all-gather", "int64", "24", lambda _: 24),
        "last formed, prepared, committed of every member",
    ),
    Collective(
        *("broadcast", "forming", "broadcast", "uint8", "the shared state"),
        lambda sizes: sizes.state_bytes,
        "from the source, if anybody receives",
    ),
    Collective(
        *("hash_compare", "forming", "all-gather", "int64", "8", lambda _: 8),
        "hash of the committed state",
    ),
    Collective(
        *("advantage_moments", "iteration", "all-gather", "float64", "24", lambda _: 24),
        "count, mean, m2; with ppo.advantage_scope = global",
    ),
    Collective(
        *("epoch_moments", "iteration", "all-gather", "float64", "8·E·M·moments of observations"),
        lambda sizes: 8 * sizes.mini_batches * sizes.moment_values,
        "with ppo.normaliser_update = sonic_epochs",
    ),
    Collective(
        *("aux_counts", "iteration", "sum", "float64", "16·E·M"),
        lambda sizes: 16 * sizes.mini_batches if sizes.latent else 0,
        "samples of each mini-batch, and of its privileged encoder; with aux.latent",
    ),
    Collective(
        *("mini_batch", "mini_batch", "sum", "float64", "24", lambda _: 24),
        "ΣKL, samples, ranks where something is not finite",
    ),
    Collective(
        *("gradients", "mini_batch", "mean", "parameters", "the parameters"),
        lambda sizes: sizes.parameters_bytes,
        "DDP, bucket by bucket",
    ),
    Collective(
        *("last", "iteration", "all-gather", "uint8", "72 + 8·⌈B/64⌉ + 8·R"),
        lambda sizes: sizes.header_bytes + 8 * sizes.record_values,
        "9 int64 of header, a bit for each of B env blocks, the learner's float64 record",
    ),
    Collective(
        *("barrier", "iteration", "sum", "int64", "8", lambda _: 8),
        "prepared becomes committed",
    ),
    Collective(
        *("conclude", "end", "sum", "int64", "8", lambda _: 8),
        "the others wait for rank 0's checkpoint",
    ),
)
"""In the order in which they happen."""

ORDERED: Final = (
    Collective(
        *("block_count", "iteration", "all-gather", "int64", "8", lambda _: 8),
        "how many env blocks each rank brings",
    ),
    Collective(
        *("blocks", "iteration", "all-gather", "int64", "8·K", lambda sizes: 8 * sizes.rank_blocks),
        "which they are, of at most K a rank",
    ),
    Collective(
        *("block_gradients", "mini_batch", "all-gather", "parameters", "K·the parameters"),
        lambda sizes: sizes.rank_blocks * sizes.parameters_bytes,
        "the gradient of each env block, instead of gradients",
    ),
)
"""Only with ``ppo.reduction = "ordered"``."""

MOVES: Final = (
    Collective(
        *("rows_wanted", "forming", "all-gather", "uint8", "2·blocks of the job"),
        lambda sizes: 2 * sizes.job_blocks,
        "env blocks whose rows a node lacks, and has",
    ),
    Collective(
        *("rows_bytes", "forming", "all-gather", "int64", "8", lambda _: 8),
        "how much each rank sends",
    ),
    Collective(
        *("rows", "forming", "all-gather", "uint8", "at most the rows of all envs"),
        lambda sizes: sizes.job_blocks * sizes.block_rows_bytes,
        "env rows for nodes that lack them, if one rank sends all",
    ),
)
"""Only with ``env.backup = "node"``, and in generations of several nodes; with ``checkpoint.env_rows`` also
before each checkpoint."""

NAMES: Final = tuple(entry.name for entry in (*TABLE, *ORDERED, *MOVES))


def of_job(config: Config) -> tuple[Collective, ...]:
    """The collectives that this job runs, in the order in which they happen."""
    entries: list[Collective] = []
    for entry in TABLE:
        if entry.name == "advantage_moments" and config.ppo.advantage_scope != "global":
            continue
        if config.ppo.reduction == "ddp":
            entries.append(entry)
            continue
        if entry.name == "advantage_moments":
            entries += ORDERED[:2]
        entries.append(_by_block(entry))
    if config.env.backup == "node":
        entries[_FORMING:_FORMING] = MOVES
    return tuple(entries)


_FORMING: Final = sum(entry.when == "forming" for entry in TABLE)


def _by_block(entry: Collective) -> Collective:
    """What it is with ``ppo.reduction = "ordered"``: sums over samples are gathered block by block."""
    if entry.name == "gradients":
        return ORDERED[2]
    if entry.name == "last":
        return replace(
            entry,
            size="72 + 8·⌈B/64⌉ + 8·K·R",
            size_bytes=lambda sizes: (
                sizes.header_bytes + 8 * sizes.rank_blocks * sizes.record_values
            ),
        )
    if entry.when in ("forming", "end") or entry.name == "barrier":
        return entry
    return replace(
        entry,
        operation="all-gather",
        size=f"K·({entry.size})",
        size_bytes=lambda sizes: sizes.rank_blocks * entry.size_bytes(sizes),
    )


Count = Annotated[int, msgspec.Meta(ge=0)]
"""A counter takes no other: a negative one is no message."""


class Use(msgspec.Struct, frozen=True, array_like=True):
    """How one worker used a collective since its last report."""

    calls: Count
    size_bytes: Count
    """What this worker put in, added up."""
    seconds: float
    """What it waited, added up."""
