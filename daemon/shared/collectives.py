"""Every collective that a job ever runs, in one table: printed, measured, and checked by tests.

Their order and number never depend on data, and every rank takes part in each, also with nothing to
contribute. A collective that does not stand here cannot be run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

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

ORDERED: Final = ("block_count", "blocks", "block_gradients")
"""Only with ``ppo.reduction = "ordered"``: all-gathers of how many env blocks each rank brings and which,
once an iteration, and of the gradient of each block, which take the place of ``gradients``. There
``advantage_moments``, ``mini_batch`` and the record of ``last`` are gathered per block too."""

MOVES: Final = ("rows_wanted", "rows_bytes", "rows")
"""Only with ``env.backup = "node"``, at the beginning of a generation of several nodes: all-gathers that
bring env rows to the nodes that lack them."""

NAMES: Final = (*(entry.name for entry in TABLE), *ORDERED, *MOVES)


Count = Annotated[int, msgspec.Meta(ge=0)]
"""A counter takes no other: a negative one is no message."""


class Use(msgspec.Struct, frozen=True, array_like=True):
    """How one worker used a collective since its last report."""

    calls: Count
    size_bytes: Count
    """What this worker put in, added up."""
    seconds: float
    """What it waited, added up."""
