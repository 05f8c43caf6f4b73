"""The fixed-size record that each rank puts into the last collective of an iteration."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.messages import RankRecord
from rallypoint.daemon.shared.plan import Plan
from rallypoint.trainer.elastic.state import CommitRecord
from rallypoint.trainer.errors import TrainerError

_HEADER_FIELDS = 9


def mark_words(config: Config) -> int:
    """Words of 64 bits that hold a bit for each env block that one rank can bring."""
    return -(-config.env.num_envs // config.env.block // 64)


def header_bytes(config: Config) -> int:
    """What precedes the body in the last collective."""
    return 8 * (_HEADER_FIELDS + mark_words(config))


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
    rollout_us: int
    """Microseconds that this rank has spent on rollouts since its last commit."""
    update_us: int
    """Likewise on updates."""
    cut: tuple[int, ...]
    """Which of its blocks began new episodes for it, as `mark` packs them."""


def mark(some: Collection[int], blocks: Sequence[int], words: int) -> tuple[int, ...]:
    """A bit for each of these blocks that is among ``some``, in ``words`` words."""
    bits = np.zeros(64 * words, dtype=np.uint8)
    bits[: len(blocks)] = [block in some for block in blocks]
    return tuple(np.packbits(bits).view(np.int64).tolist())


def marked(marks: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Those of the blocks that `mark` marked."""
    bits = np.unpackbits(np.array(marks, dtype=np.int64).view(np.uint8))
    return tuple(block for block, bit in zip(blocks, bits.tolist(), strict=False) if bit)


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
            packet.rollout_us,
            packet.update_us,
            *packet.cut,
        ],
        dtype=torch.int64,
    )
    return torch.cat([header.view(torch.uint8), body.cpu().contiguous().view(torch.uint8)])


def unpack(rows: Sequence[Tensor], words: int) -> tuple[list[Packet], list[Tensor]]:
    """Headers, with this many words of marks, and bodies, in rank order."""
    size = 8 * (_HEADER_FIELDS + words)
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
                rollout_us=values[7],
                update_us=values[8],
                cut=tuple(values[9:]),
            )
        )
        bodies.append(row[size:].clone().view(torch.float64))
    return packets, bodies


def of_time(packets: Sequence[Packet]) -> dict[str, float]:
    """Figures of where the time of an iteration went: means over ranks, and the slowest rollout over the
    median one (of two, the quicker is the median)."""
    each = 1e-6 / len(packets)
    rollouts = sorted(packet.rollout_us for packet in packets)
    median_us = max(1, rollouts[(len(rollouts) - 1) // 2])
    return {
        "straggler_ratio": rollouts[-1] / median_us,
        "rollout_s": each * sum(packet.rollout_us for packet in packets),
        "update_s": each * sum(packet.update_us for packet in packets),
    }


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
            cut=marked(packets[r].cut, used[r]),
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
