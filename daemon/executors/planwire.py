"""How a plan lies in the membership store: JSON, its members as columns.

Everybody reads every plan, so its size times the nodes is what a change costs the store's network. A
list of numbers for each field, and env blocks as runs, make a plan of a thousand workers a fifth of what
an object for each would be.
"""

from collections.abc import Sequence

import msgspec

from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey


class Columns(msgspec.Struct, frozen=True):
    """Planned workers; all lists are of the same length."""

    nodes: list[str]
    slots: list[int]
    incarnations: list[int]
    ranks: list[int]
    hosts: list[str]
    ports: list[int]
    blocks: list[list[int]]
    """Of each: first id and length of every run of consecutive ids."""
    capacities: list[int]


class Wire(msgspec.Struct, frozen=True):
    """A plan."""

    plan: Plan
    """Without what stands below."""
    members: Columns
    left_out: Columns
    survivors: int | tuple[WorkerKey, ...]
    """A number: they are the first members."""


def encode_plan(plan: Plan) -> bytes:
    """The value of the key ``generation``."""
    count = len(plan.survivors)
    first = plan.survivors == tuple(m.key for m in plan.members[:count])
    wire = Wire(
        plan=msgspec.structs.replace(plan, members=(), left_out=(), survivors=()),
        members=_columns(plan.members),
        left_out=_columns(plan.left_out),
        survivors=count if first else plan.survivors,
    )
    return msgspec.json.encode(wire)


def decode_plan(data: bytes) -> Plan:
    """The plan in such a value. Raises `msgspec.MsgspecError` for anything else."""
    wire = msgspec.json.decode(data, type=Wire)
    members, survivors = _workers(wire.members), wire.survivors
    if isinstance(survivors, int):
        survivors = tuple(m.key for m in members[:survivors])
    return msgspec.structs.replace(
        wire.plan, members=members, left_out=_workers(wire.left_out), survivors=survivors
    )


def _columns(workers: Sequence[PlannedWorker]) -> Columns:
    return Columns(
        nodes=[w.key.node for w in workers],
        slots=[w.key.slot for w in workers],
        incarnations=[w.key.incarnation for w in workers],
        ranks=[w.rank for w in workers],
        hosts=[w.host for w in workers],
        ports=[w.port for w in workers],
        blocks=[_runs(w.blocks) for w in workers],
        capacities=[w.capacity_envs for w in workers],
    )


def _workers(columns: Columns) -> tuple[PlannedWorker, ...]:
    c = columns
    keys = map(WorkerKey, c.nodes, c.slots, c.incarnations)
    blocks = map(_ids, c.blocks)
    return tuple(map(PlannedWorker, keys, c.ranks, c.hosts, c.ports, blocks, c.capacities))


def _runs(ids: Sequence[int]) -> list[int]:
    runs: list[int] = []
    for number in ids:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return runs


def _ids(runs: Sequence[int]) -> tuple[int, ...]:
    if len(runs) == 2:  # nearly always
        return tuple(range(runs[0], runs[0] + runs[1]))
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return tuple(number for first, count in pairs for number in range(first, first + count))
