"""The fixed-size record that each rank puts into the last collective of an iteration."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from rallypoint.daemon.shared.messages import RankRecord
from rallypoint.daemon.shared.plan import Plan
from rallypoint.trainer.elastic.state import CommitRecord
from rallypoint.trainer.errors import TrainerError

_HEADER_FIELDS = 7
HEADER_BYTES = 8 * _HEADER_FIELDS


class Packet(msgspec.Struct, frozen=True):
    """Header of one rank's record; the body is the algorithm's float64 vector."""

    generation: int
    iteration: int
    newest_plan: int
    """Newest plan generation this rank has seen; the least over ranks ends the generation."""
    stop: bool
    finite: bool
    state_hash: int
    """Hash of the replicated state after the last optimiser step, before statistics are merged."""
    env_steps: int
    """Env steps of this rank that the iteration used."""


def pack(packet: Packet, body: Tensor) -> Tensor:
    """Header and float64 body ``[R]`` as one uint8 vector; its size is the same on every rank."""
    header = torch.tensor(
        [
            packet.generation,
            packet.iteration,
            packet.newest_plan,
            int(packet.stop),
            int(packet.finite),
            packet.state_hash,
            packet.env_steps,
        ],
        dtype=torch.int64,
    )
    return torch.cat([header.view(torch.uint8), body.cpu().contiguous().view(torch.uint8)])


def unpack(rows: Sequence[Tensor]) -> tuple[list[Packet], list[Tensor]]:
    """Headers and bodies, in rank order."""
    size = HEADER_BYTES
    packets, bodies = [], []
    for row in rows:
        values = [int(x) for x in row[:size].clone().view(torch.int64)]
        packets.append(
            Packet(
                generation=values[0],
                iteration=values[1],
                newest_plan=values[2],
                stop=bool(values[3]),
                finite=bool(values[4]),
                state_hash=values[5],
                env_steps=values[6],
            )
        )
        bodies.append(row[size:].clone().view(torch.float64))
    return packets, bodies


def check_same_iteration(packets: Sequence[Packet]) -> None:
    """Raises `TrainerError` when ranks are in different iterations, or hold parameters that are not
    finite: both are errors of the program, the same on every rank."""
    if len({(p.generation, p.iteration) for p in packets}) > 1:
        raise TrainerError(f"ranks are in different iterations: {list(packets)}")
    bad = [r for r, p in enumerate(packets) if not p.finite]
    if bad:
        raise TrainerError(
            f"iteration {packets[0].iteration}: parameters are not finite on ranks {bad}; lower "
            "ppo.learning_rate_bounds, or look for a reward or observation that is not finite"
        )


def plan_blocks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Env blocks by rank, as planned."""
    return tuple(member.blocks for member in plan.members)


def build_record(
    plan: Plan,
    packets: Sequence[Packet],
    used: Sequence[tuple[int, ...]],
    env_steps_before: int,
    metrics: dict[str, float],
) -> CommitRecord:
    """What every rank knows of the iteration once it has all packets; ``used`` are the env blocks by
    rank whose rollout entered it."""
    ranks = tuple(
        RankRecord(
            key=member.key,
            blocks=used[r],
            dropped=tuple(b for b in member.blocks if b not in used[r]),
            env_steps=packets[r].env_steps,
        )
        for r, member in enumerate(plan.members)
    )
    return CommitRecord(
        generation=plan.generation,
        iteration=packets[0].iteration,
        env_steps_total=env_steps_before + sum(p.env_steps for p in packets),
        ranks=ranks,
        metrics=metrics,
        stop=any(p.stop for p in packets),
        newest_plan=min(p.newest_plan for p in packets),
    )
