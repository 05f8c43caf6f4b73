"""The status document: the schema that ``rallypoint status --json`` promises, built from facts."""

from typing import Any, Literal

from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.executors.metrics import PHASES
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import Plan

ShownJobState = Literal["starting", "running", "holding", "paused", "finished", "failed"]


def job_state(job: JobRecord, formed: Plan | None, node: NodeState) -> ShownJobState:
    """The stored state, and what follows from the members: before anything has formed the job is
    starting; without ``min_workers`` it holds, unless the node is on its way out."""
    if job.state != "running" or node.ending is not None:
        return job.state
    if formed is None:
        return "starting"
    if formed.hold or not any(slot.trains and slot.rank is not None for slot in node.slots):
        return "holding"
    return "running"


def build(
    *,
    config: Config,
    job: JobRecord,
    node: NodeState,
    recorder: Recorder,
    metrics_url: str,
    now_unix_s: float,
) -> dict[str, Any]:
    """The document; values that are not there are None."""
    formed = recorder.formed_plan
    checkpoint = recorder.checkpoint
    return {
        "job": config.job.name,
        "state": job_state(job, formed, node),
        "generation": None if formed is None else formed.generation,
        "world_size": None if formed is None else formed.world_size,
        "iteration": recorder.iteration,
        "env_steps": recorder.env_steps,
        "num_envs": None if formed is None else formed.num_envs(config.env.block),
        "metrics_url": metrics_url,
        "workers": _workers(config, node, formed),
        "last_change": _last_change(recorder),
        "checkpoint": {
            "iteration": None if checkpoint is None else checkpoint.iteration,
            "path": None if checkpoint is None else checkpoint.path,
            "age_seconds": None
            if checkpoint is None
            else round(max(0.0, now_unix_s - checkpoint.at_unix_s), 3),
        },
    }


def _workers(config: Config, node: NodeState, formed: Plan | None) -> list[dict[str, Any]]:
    workers = []
    for slot in node.slots:
        member = None if formed is None else formed.find(node.key(slot))
        workers.append(
            {
                "node": node.policy.node,
                "slot": slot.slot,
                "pid": slot.pid if slot.live else None,
                "rank": None if member is None or not slot.live else member.rank,
                "incarnation": slot.incarnation,
                "state": slot.state,
                "committed_iteration": slot.committed_iteration,
                "num_envs": None
                if member is None or not slot.live
                else len(member.blocks) * config.env.block,
            }
        )
    return workers


def quarantined(node: NodeState, now: float) -> list[dict[str, Any]]:
    """Slots in quarantine: how often their lives failed, how the last one ended, seconds left."""
    return [
        {
            "node": node.policy.node,
            "slot": slot.slot,
            "failures": slot.failures,
            "reason": slot.quarantined_for,
            "seconds_left": round(max(0.0, (slot.restart_at_s or now) - now), 1),
        }
        for slot in node.slots
        if slot.state == "quarantined"
    ]


def _last_change(recorder: Recorder) -> dict[str, Any]:
    change = recorder.recovery.last
    if change is None:
        seconds: dict[str, float | None] = dict.fromkeys(PHASES)
        return {"kind": None, "cause": None, "generation": None, "seconds": seconds}
    return {
        "kind": change.plan.kind,
        "cause": change.plan.cause,
        "generation": change.plan.generation,
        "seconds": change.seconds(),
    }
