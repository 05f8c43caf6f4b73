"""What a node may do at this moment: commit to shared storage, hand out a plan, begin from nothing."""

from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.messages import AskCommit, CommitAnswer
from rallypoint.daemon.shared.plan import Plan, WorkerKey


def commit_refusal(state: NodeState, key: WorkerKey, generation: int, now: float) -> str:
    """Why a worker of this node may not put the manifest of a checkpoint that it made in
    ``generation``; "" when it may: it is a member of the newest formed generation, and this node
    holds its lease."""
    formed = state.formed_plan
    if state.past_lease(now):
        return "this supervisor is past the deadline of its lease"
    if formed is None or formed.generation != state.formed:
        return f"generation {state.formed} is marked formed, but its plan is not known here"
    if generation > formed.generation:
        return f"generation {generation} is not marked formed yet"
    if formed.find(key) is None:
        return f"{key} is no member of generation {formed.generation}, the newest formed"
    return ""


def answer_commit(state: NodeState, question: AskCommit, now: float) -> CommitAnswer:
    """What a worker that asks is told: only members of the newest formed generation write to shared
    storage, and only while this node holds its lease."""
    reason = commit_refusal(state, question.key, question.generation, now)
    return CommitAnswer(
        ask=question.ask,
        allowed=not reason,
        reason=reason or f"member of generation {state.formed}",
    )


def welcome(state: NodeState, key: WorkerKey, now: float) -> tuple[int, Plan | None]:
    """(formed mark, plan) that a worker may be told at Hello; past the lease it is told neither."""
    plan = state.plan
    if state.past_lease(now):
        return 0, None
    return state.formed, plan if plan is not None and plan.find(key) is not None else None


def from_scratch_refusal(plan: Plan, job: JobRecord) -> str:
    """Why a plan that restores may not be written over this record of the job; "" when it may: it was decided
    before anybody had registered progress, and would begin from nothing."""
    if plan.resumes or (job.iteration == 0 and job.checkpoint is None):
        return ""
    return (
        f"generation {plan.generation} would start from scratch, but the job holds progress meanwhile "
        f"(iteration {job.iteration}, checkpoint {job.checkpoint})"
    )
