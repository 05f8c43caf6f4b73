"""Gauges that follow from the newest generation and from the slots of this node."""

from rallypoint.daemon.core.records import WORKER_STATES
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import Plan


def worker_states(metrics: Metrics, states: list[str]) -> None:
    """Slots by worker state."""
    for state in WORKER_STATES:
        metrics.set("members", states.count(state), state=state)
    metrics.set("slot_quarantined", states.count("quarantined"))


def generation(metrics: Metrics, config: Config, plan: Plan) -> None:
    """Number, members and envs of the newest formed generation."""
    block = config.env.block
    by_worker = [len(member.blocks) * block for member in plan.members]
    wanted = plan.budget_envs
    if config.env.budget == "per_rank":
        wanted *= config.job.max_workers or config.node.workers
    metrics.set("generation", plan.generation)
    metrics.set("world_size", plan.world_size)
    metrics.set("envs", max(by_worker, default=0), scope="worker")
    metrics.set("envs", sum(by_worker), scope="global")
    metrics.set("envs", max(0, wanted - sum(by_worker)), scope="deficit")
