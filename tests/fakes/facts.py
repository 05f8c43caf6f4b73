"""Short ways to make the facts that the supervisor's books are kept from."""

from typing import Any

from rallypoint.daemon.shared.messages import Committed, Formed, RankRecord
from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey

A, B, C = (WorkerKey("local", slot, 1) for slot in range(3))


def plan(generation: int, *keys: WorkerKey, **fields: Any) -> Plan:
    """A plan in which the member of rank r holds env block r."""
    members = tuple(
        PlannedWorker(key, rank, "127.0.0.1", 1000 + rank, (rank,)) for rank, key in enumerate(keys)
    )
    defaults: dict[str, Any] = {
        "kind": "forced",
        "cause": "worker_lost",
        "formed": generation - 1,
        "restore": False,
        "hold": False,
        "commit_first": False,
        "budget_envs": 8,
        "survivors": keys,
    }
    return Plan(generation=generation, members=members, **{**defaults, **fields})


def formed(key: WorkerKey, generation: int, iteration: int = 0, **fields: Any) -> Formed:
    """A member's report that a generation is formed."""
    defaults: dict[str, Any] = {
        "state_hash": f"hash-{iteration}",
        "source": A,
        "rolled_back": False,
        "seconds": {},
        "at_s": 0.0,
    }
    return Formed(key=key, generation=generation, iteration=iteration, **{**defaults, **fields})


def committed(
    key: WorkerKey, iteration: int, ranks: dict[WorkerKey, int], **fields: Any
) -> Committed:
    """A member's report of a committed iteration; ``ranks`` has the used env steps of each."""
    defaults: dict[str, Any] = {
        "generation": 1,
        "env_steps_total": 100 * iteration,
        "state_hash": f"hash-{iteration}",
        "metrics": {"reward_mean": 0.1 * iteration},
        "activity": {"rollout": 0.5},
    }
    records = tuple(
        RankRecord(member, (rank,), (), steps) for rank, (member, steps) in enumerate(ranks.items())
    )
    return Committed(key=key, iteration=iteration, ranks=records, **{**defaults, **fields})
