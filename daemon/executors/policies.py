"""What the decisions are told at their start, taken from configuration and persisted state."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rallypoint.daemon.core.policy import LeaderPolicy, NodePolicy
from rallypoint.daemon.executors.persist import PersistedState
from rallypoint.daemon.shared import envbudget, timeouts
from rallypoint.daemon.shared.config import Config

_NCCL: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Distributions that bring NCCL with torch; without one of them it is torch's own, if any."""


def node_policy(config: Config, state: PersistedState, versions: dict[str, str]) -> NodePolicy:
    """Facts and bounds of this node."""
    section = config.node
    return NodePolicy(
        node=section.name,
        incarnation=state.supervisor_incarnation,
        advertise=section.advertise,
        slots=section.workers,
        first_incarnation=max(state.slot_incarnations.values(), default=0),
        stop_grace_s=section.stop_grace_s,
        adopt_s=timeouts.derive(config).adopt_s,
        quarantine_after=config.membership.quarantine_after,
        quarantine_cooldown_s=config.membership.quarantine_cooldown_s,
        versions=versions,
        job_uid=state.job.uid,
        config_hash=state.job.config_hash,
        newest_generation=state.generation,
        alone=config.membership.backend == "embedded",
    )


def leader_policy(config: Config) -> LeaderPolicy:
    """Facts and bounds of the job."""
    low, high = envbudget.world_size_range(config)
    times = timeouts.derive(config, high)
    return LeaderPolicy(
        budget=config.env.budget,
        num_envs=config.env.num_envs,
        block=config.env.block,
        min_workers=low,
        max_workers=high,
        coalesce_s=times.coalesce_s,
        probe_s=times.probe_s,
        join_debounce_s=times.join_debounce_s,
        spares=config.job.spares,
        detect_s=times.detect_s,
        witness_s=times.witness_s,
        holder_wait_s=times.holder_wait_s,
        alone=config.membership.backend == "embedded",
        shared_checkpoints=config.checkpoint.url is not None
        and config.checkpoint.local_every_iterations is None,
        iterations=config.job.iterations,
        env_steps=config.job.env_steps,
    )


def installed_versions() -> dict[str, str]:
    """Versions that members of a job must share; read from metadata, nothing is imported."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("rallypoint", "torch"):
        versions[name] = _version(name) or "not installed"
    nccl = next((found for name in _NCCL if (found := _version(name))), None)
    return versions if nccl is None else {**versions, "nccl": nccl}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
