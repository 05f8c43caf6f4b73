"""Gauges that follow from the newest generation, the newest iteration, and the slots of this node."""

import time
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.daemon.core.records import WORKER_STATES
from rallypoint.daemon.executors.accounting import NewestChanges, RecoveryClock
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.messages import Committed
from rallypoint.daemon.shared.plan import CHANGE_KINDS, Plan, WorkerKey

_OF_A_WORKER = ("rollout", "update")
"""Activities whose seconds are shown per worker."""


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
    metrics.set("world_size_wanted", max(plan.wanted_workers, plan.world_size))
    metrics.set("envs", max(by_worker, default=0), scope="worker")
    metrics.set("envs", sum(by_worker), scope="global")
    metrics.set("envs", max(0, wanted - sum(by_worker)), scope="deficit")


def iteration(metrics: Metrics, message: Committed) -> None:
    """The newest committed iteration. Its figures are those of all ranks, whoever reports them."""
    figures = message.metrics
    metrics.set("iteration", message.iteration)
    metrics.set_train_figures(figures)
    metrics.add("non_finite_total", max(0.0, figures.get("skipped_steps", 0.0)))
    if "straggler_ratio" in figures:
        metrics.set("straggler_ratio", figures["straggler_ratio"])


def worker(metrics: Metrics, message: Committed) -> None:
    """What a worker took for its part of an iteration."""
    for activity in _OF_A_WORKER:
        if activity in message.activity:
            name, slot = f"worker_{activity}_seconds", str(message.key.slot)
            metrics.set(name, message.activity[activity], slot=slot)


def worker_gone(metrics: Metrics, key: WorkerKey) -> None:
    """A worker's process is gone: none of its series stays."""
    for activity in _OF_A_WORKER:
        metrics.forget(f"worker_{activity}_seconds", str(key.slot))


def ages(
    metrics: Metrics,
    recovery: RecoveryClock,
    changes: NewestChanges,
    progressed_s: Callable[[], float],
) -> None:
    """What grows by itself, computed at each scrape by this machine's monotonic clock."""

    def age_s(kind: str) -> float:
        return changes.age_s(kind, time.monotonic())

    metrics.compute("progress_age_seconds", lambda: time.monotonic() - progressed_s())
    metrics.compute("recovery_age_seconds", lambda: recovery.open_for_s(time.monotonic()))
    for kind in CHANGE_KINDS:
        metrics.compute("last_change_seconds", partial(changes.total_s, kind), kind=kind)
        metrics.compute("last_change_age_seconds", partial(age_s, kind), kind=kind)


def seconds(
    metrics: Metrics, wall: Mapping[tuple[str, str], float], badput: Mapping[str, float]
) -> None:
    """What the slots of this node have spent, by activity and phase, and which of it was no progress, why."""
    for (activity, phase), spent_s in wall.items():
        metrics.add("wall_seconds_total", spent_s, activity=activity)
        if activity == "recovery":
            metrics.add("recovery_wall_seconds_total", spent_s, phase=phase)
    for cause, lost_s in badput.items():
        metrics.add("badput_seconds_total", lost_s, cause=cause)
