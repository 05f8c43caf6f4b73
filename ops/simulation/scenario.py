"""What one seed stands for: the shape of the cluster, the policies, how often what goes wrong."""

import random
from dataclasses import dataclass
from typing import Final, Literal

from rallypoint.daemon.core.policy import LeaderPolicy, NodePolicy

FAULTS: Final = (
    "worker_killed",
    "killed_in_commit",
    "killed_in_forming",
    "worker_stopped",
    "supervisor_killed",
    "node_killed",
    "machine_lost",
    "node_drained",
    "cut_from_etcd",
    "cut_off",
    "partition",
    "etcd_down",
    "etcd_leader_change",
    "compaction",
    "worker_raises",
    "all_nodes_lost",
    "all_supervisors_killed",
    "group_cut_off",
    "left_behind",
    "several_at_once",
)
"""Everything that a seed may do to a cluster."""

End = Literal["none", "finished", "stopped", "failed"]
ENDS: Final[tuple[End, ...]] = ("none", "none", "none", "none", "finished", "stopped", "failed")
"""How jobs end, as often as it is listed."""
DETECT_S: Final = 5.0
HANG_S: Final = 10.0
ORPHAN_GRACE_S: Final = 10.0
HOLDER_WAIT_S: Final = ORPHAN_GRACE_S + DETECT_S
BLOCK: Final = 8


@dataclass(frozen=True)
class Scenario:
    """The settings of one run; times in virtual seconds."""

    seed: int
    slots: tuple[int, ...]
    """Slots of each node."""
    budget: Literal["per_rank", "global"]
    min_workers: int
    max_workers: int
    spares: int
    shared_checkpoints: bool
    checkpoint_every: int
    """Iterations."""
    iteration_s: float
    faulty_s: float
    """How long faults come."""
    fault_every_s: float
    """Mean time between two of them."""
    faults: tuple[str, ...]
    message_s: float
    """Longest delay of an ordinary message."""
    loss: float
    """Part of the messages to and from etcd that get lost."""
    end: End
    """How the job ends: not; at an iteration; because the operator stops it; for an error of its program."""
    end_iteration: int
    """The last one, or the one that no worker gets through."""

    @property
    def last_iteration(self) -> int | None:
        return self.end_iteration if self.end == "finished" else None

    @property
    def failing_iteration(self) -> int | None:
        return self.end_iteration if self.end == "failed" else None

    @property
    def workers(self) -> int:
        return sum(self.slots)

    def leader_policy(self) -> LeaderPolicy:
        """What every node of this job is told about it."""
        return LeaderPolicy(
            budget=self.budget,
            num_envs=BLOCK * (2 * self.workers if self.budget == "global" else 2),
            block=BLOCK,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            coalesce_s=0.05,
            probe_s=0.2,
            join_debounce_s=1.0,
            spares=self.spares,
            detect_s=DETECT_S,
            witness_s=DETECT_S / 5,
            holder_wait_s=HOLDER_WAIT_S,
            alone=False,
            shared_checkpoints=self.shared_checkpoints,
            iterations=self.last_iteration,
        )

    def node_policy(
        self, node: int, incarnation: int, first_incarnation: int, newest_generation: int
    ) -> NodePolicy:
        """What one life of a node's supervisor is told."""
        return NodePolicy(
            node=f"n{node:04d}",
            incarnation=incarnation,
            advertise=f"n{node:04d}",
            slots=self.slots[node],
            first_incarnation=first_incarnation,
            stop_grace_s=10.0,
            adopt_s=DETECT_S,
            quarantine_after=6,
            quarantine_cooldown_s=20.0,
            versions={"torch": "1"},
            job_uid="job",
            config_hash="hash",
            newest_generation=newest_generation,
            alone=False,
        )


def draw(seed: int, nodes: int | None = None, faults: tuple[str, ...] = FAULTS) -> Scenario:
    """The scenario of a seed, of as many nodes as are asked for (else 2 to 20, mostly few)."""
    choose = random.Random(seed)  # noqa: S311 - reproducible, nothing secret
    count = nodes or choose.choice([2, 3, 3, 4, 4, 5, 6, 8, choose.randrange(2, 21)])
    slots = tuple(choose.choice([1, 1, 2, 3]) for _ in range(count))
    total = sum(slots)
    spares = choose.choice([0, 0, 0, 1, 2])
    most = choose.choice([total, total, max(1, total - 1), max(1, total // 2)])
    return Scenario(
        seed=seed,
        slots=slots,
        budget=choose.choice(["per_rank", "global"]),
        min_workers=choose.choice([1, 1, 2, max(1, most - 1)]) if most > 1 else 1,
        max_workers=most,
        spares=min(spares, total - 1),
        shared_checkpoints=choose.random() < 0.6,
        checkpoint_every=choose.choice([1, 3, 8]),
        iteration_s=choose.choice([0.4, 1.0, 2.5]),
        faulty_s=choose.choice([20.0, 40.0, 80.0]),
        fault_every_s=choose.choice([1.5, 4.0, 10.0]),
        faults=tuple(f for f in faults if choose.random() < 0.6) or faults[:1],
        message_s=choose.choice([0.003, 0.003, 0.05, 0.5]),
        loss=choose.choice([0.0, 0.0, 0.02]),
        end=choose.choice(ENDS),
        end_iteration=choose.randrange(2, 40),
    )
