"""The status document: the schema that ``rallypoint status --json`` promises, built from facts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.daemon.core import holding
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord, MemberRecord, ShownJobState
from rallypoint.daemon.executors.labels import PHASES
from rallypoint.daemon.executors.recorder import Recorder
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import Plan, WorkerKey


def _job_state(
    config: Config,
    job: JobRecord,
    formed: Plan | None,
    node: NodeState,
    elsewhere: list[dict[str, Any]],
    trouble: str,
) -> tuple[ShownJobState, str]:
    """The stored state, and what follows from the members, each with its reason: before anything has
    formed the job is starting; without ``min_workers`` it holds, and also where a generation is broken
    and no other can be agreed, unless the node is on its way out."""
    if job.state != "running" or node.ending is not None:
        return job.state, job.reason
    if formed is None:
        return "starting", trouble
    here = any(slot.trains and slot.rank is not None for slot in node.slots)
    if not (here or any(worker["rank"] is not None for worker in elsewhere)):
        text = f"no worker of generation {formed.generation} takes part"
        return "holding", f"{text}; {trouble}" if trouble else text
    if formed.hold:
        numbers = f"{formed.world_size} of job.min_workers = {config.job.min_workers}"
        return "holding", f"generation {formed.generation} has {numbers} workers"
    broken = holding.broken_here(node)
    if broken and trouble:
        return "holding", f"{broken}, and no other generation can be agreed: {trouble}"
    return "running", ""


def build(
    *,
    config: Config,
    job: JobRecord,
    node: NodeState,
    recorder: Recorder,
    others: Sequence[MemberRecord],
    trouble: str,
    metrics_url: str,
    now_unix_s: float,
) -> dict[str, Any]:
    """The document; values that are not there are None. It shows the whole job: workers of ``others``
    as the store has them, which does not know their process, nor each iteration. ``trouble``: why
    nothing can be agreed through the store now; "" while it can."""
    formed = recorder.formed_plan
    checkpoint = recorder.checkpoints.newest
    elsewhere = _workers_elsewhere(config, others, formed)
    workers = [*_workers(config, node, formed), *elsewhere]
    workers.sort(key=lambda worker: (worker["node"], worker["slot"]))
    iteration, env_steps = recorder.iteration, recorder.env_steps
    if not recorder.takes_part:
        iteration, env_steps = max(iteration, job.iteration), max(env_steps, job.env_steps)
    state, reason = _job_state(config, job, formed, node, elsewhere, trouble)
    return {
        "job": config.job.name,
        "state": state,
        "reason": reason or None,
        "generation": None if formed is None else formed.generation,
        "world_size": None if formed is None else formed.world_size,
        "iteration": iteration,
        "env_steps": env_steps,
        "num_envs": None if formed is None else formed.num_envs(config.env.block),
        "metrics_url": metrics_url,
        "warm_start": job.warm_start,
        "workers": workers,
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
                "state": node.shown(slot),
                "committed_iteration": slot.committed_iteration,
                "num_envs": None
                if member is None or not slot.live
                else len(member.blocks) * config.env.block,
            }
        )
    return workers


def _workers_elsewhere(
    config: Config, others: Sequence[MemberRecord], formed: Plan | None
) -> list[dict[str, Any]]:
    workers = []
    for member, slot in ((m, s) for m in others for s in m.slots):
        gone = slot.state in ("stopped", "lost", "quarantined")
        kept_out = bool(member.quarantined) and slot.state == "ready"
        key = WorkerKey(member.node, slot.slot, slot.incarnation)
        planned = None if formed is None or gone else formed.find(key)
        workers.append(
            {
                "node": member.node,
                "slot": slot.slot,
                "pid": None,
                "rank": None if planned is None else planned.rank,
                "incarnation": slot.incarnation,
                "state": "quarantined" if kept_out else slot.state,
                "committed_iteration": None,
                "num_envs": None if planned is None else len(planned.blocks) * config.env.block,
            }
        )
    return workers


def quarantined(
    node: NodeState, now: float, others: Sequence[MemberRecord] = ()
) -> list[dict[str, Any]]:
    """Slots in quarantine, for crashes of their own or because their node flaps: how often that was, how
    the last life ended or what happened, seconds left; of other nodes only what their records say."""
    name, found = node.policy.node, []
    for slot in node.slots:
        if node.shown(slot) != "quarantined":
            continue
        if slot.state == "quarantined":
            until_s, why = slot.restart_at_s, ("crashes", slot.failures, slot.quarantined_for)
        else:
            until_s, why = node.quarantined_until_s, ("flapping", node.omissions, node.quarantine)
        left_s = round(max(0.0, (until_s or now) - now), 1)
        found.append(_quarantined(name, slot.slot, *why, left_s))
    for member, record in ((m, s) for m in others for s in m.slots):
        if record.state == "quarantined":
            found.append(_quarantined(member.node, record.slot, "crashes", None, None, None))
        elif member.quarantined and record.state == "ready":
            why_not = member.quarantined
            found.append(_quarantined(member.node, record.slot, "flapping", None, why_not, None))
    return sorted(found, key=lambda entry: (entry["node"], entry["slot"]))


def _quarantined(
    node: str,
    slot: int,
    cause: str,
    failures: int | None,
    reason: str | None,
    seconds_left: float | None,
) -> dict[str, Any]:
    return {
        "node": node,
        "slot": slot,
        "cause": cause,
        "failures": failures,
        "reason": reason,
        "seconds_left": seconds_left,
    }


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


def in_short(status: Mapping[str, Any]) -> str:
    """The document of `build` in one line, for ``systemctl status``."""
    where = f"generation {status['generation']}, iteration {status['iteration']}"
    text = f"{status['state']}: {where}, {status['world_size']} workers"
    return text if status["reason"] is None else f"{text} ({status['reason']})"


def why_not_ready(status: Mapping[str, Any]) -> str:
    """What ``/readyz`` says of the document of `build`: "" while the job runs."""
    state, reason = status["state"], status["reason"]
    return "" if state == "running" else f"the job is {state}: {reason or 'see its log'}"
