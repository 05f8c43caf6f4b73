"""Which change of membership is due, and what a probe's answer makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.daemon.core import planning
from rallypoint.daemon.core.absence import ASK_AGAIN_S
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.leaderstate import Answers, LeaderState
from rallypoint.daemon.core.planning import Draft, View, Worker
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import ChangeCause, Plan, WorkerKey


@dataclass(frozen=True)
class Wait:
    """Nothing can be published yet: why, and when to look again without an event."""

    event: str
    reason: str
    at_s: float | None = None
    ask_again_s: float | None = None
    """Do not probe before this moment."""


@dataclass(frozen=True)
class Hopeless:
    """The job cannot go on."""

    reason: str


@dataclass(frozen=True)
class Inquiry:
    """Members without a lease: whether they are there decides."""

    ask: tuple[WorkerKey, ...]


Due = Draft | Inquiry | Wait | Hopeless | None


def starts(view: View, plan: Plan | None) -> bool:
    """Whether the next plan begins without anybody's live state."""
    return not view.heirs and (plan is None or bool(view.lost or view.broken))


def waiting_newcomers(view: View, plan: Plan | None) -> tuple[Worker, ...]:
    """Newcomers that wait to be let in: at a start all that are warm, else those in no plan."""
    if starts(view, plan) or plan is None:
        return view.newcomers
    return tuple(
        w for w in view.newcomers if w.record.state == "ready" and plan.find(w.key) is None
    )


def next_change(state: LeaderState, view: View, job: JobRecord, now: float) -> Due:
    """The change that is due now, or why none is; None when all is as it should be."""
    plan = state.plan
    if plan is None or starts(view, plan):
        return _recover_store(state, view, now) if view.heirs else _start(state, view, job, now)
    if view.lost or view.broken:
        return _after_loss(state, view, plan, job, now)
    if view.absent:
        return _inquire(state, view, now)
    if job.formed != plan.generation and (plan.kind == "forced" or view.begun):
        return None  # it is being formed; members report
    drain = _drain(state, view, plan)
    if isinstance(drain, Draft) or job.formed != plan.generation:
        return drain
    join = _join(state, view, plan, job, now)
    if isinstance(join, Draft) or (join is not None and join.at_s is not None):
        return join  # it is due soon, and its plan brings what else is asked for
    return _reshape(state, view, plan, job) or join or drain


# --- forced ----------------------------------------------------------------------------------------


def _after_loss(
    state: LeaderState, view: View, plan: Plan, job: JobRecord, now: float
) -> Draft | Inquiry | Wait:
    lost = ", ".join(map(str, view.lost)) or "nobody"
    stayed = [w for w in view.heirs if plan.find(w.key) is not None]
    newcomers_only = bool(view.lost) and not any(key in plan.survivor_keys for key in view.lost)
    if plan.kind == "planned" and newcomers_only and not (view.begun or view.broken) and stayed:
        if view.absent:
            return _inquire(state, view, now)
        return Draft(
            "planned",
            plan.cause,
            heirs=tuple(stayed),
            newcomers=tuple(w for w in view.newcomers if plan.find(w.key) is not None),
            why=f"{lost} died before it entered: generation {plan.generation} is superseded",
        )
    due_s = max((state.loss_at_s or now) + state.policy.coalesce_s, state.not_before_s)
    if now < due_s:
        broken = f"{len(view.broken)} of {plan.world_size} reported it broken"
        text = f"generation {plan.generation}: lost {lost}; {broken}"
        return Wait("loss_seen", text, due_s)
    stale = tuple(key for key in view.lost if key in state.given_up)
    if stale and now - state.given_up_at_s > ASK_AGAIN_S:  # nobody was there to go on without them
        return Inquiry(stale)
    why = f"generation {plan.generation}: lost {lost}"
    return _forced(view, _cause_of_loss(view, plan, job), why)


def _inquire(state: LeaderState, view: View, now: float) -> Inquiry | Wait:
    """A supervisor's silence is no loss while its workers take part: they are asked, each second."""
    if now >= state.inquire_after_s:
        return Inquiry(view.absent)
    text = f"{_names(view.absent)} have no lease, but take part: nothing is changed"
    return Wait("members_absent", text, state.inquire_after_s)


def _cause_of_loss(view: View, plan: Plan, job: JobRecord) -> ChangeCause:
    """A retry of a plan that never formed, with nobody lost, keeps the plan's own cause."""
    if view.nodes_lost:
        return "node_lost"
    if view.hung:
        return "hang"
    return plan.cause if not view.lost and job.formed < plan.generation else "worker_lost"


def _recover_store(state: LeaderState, view: View, now: float) -> Draft | Wait:
    if now < state.not_before_s:
        return Wait("store_lost", "no plan in the store, but survivors live", state.not_before_s)
    return _forced(view, "store", "the store holds no plan, but survivors live")


def _forced(view: View, cause: ChangeCause, why: str) -> Draft:
    ask = tuple(w.key for w in view.heirs)
    return Draft("forced", cause, heirs=view.heirs, ask=ask, why=why)


# --- start -----------------------------------------------------------------------------------------


def _start(state: LeaderState, view: View, job: JobRecord, now: float) -> Draft | Wait | Hopeless:
    policy, ready = state.policy, view.newcomers
    numbers = f"{len(ready)} ready of {view.expected} slots, at least {policy.min_workers} needed"
    if len(ready) < policy.min_workers:
        return Wait("start_waits", f"no survivor: {numbers}")
    complete = len(ready) >= min(view.expected, planning.most_workers(policy, job))
    due_s = state.not_before_s
    if not complete:
        due_s = max(due_s, (state.gather_at_s or now) + policy.join_debounce_s)
    if now < due_s:
        return Wait("start_waits", f"no survivor: {numbers}; waiting for the others", due_s)
    obstacle = _no_checkpoint(state, ready, job, now)
    if obstacle is not None:
        return obstacle
    members = _choose(state, ready, job)
    ask = tuple(w.key for w in members) + view.unproven
    cause = "start" if state.plan is None else _cause_of_loss(view, state.plan, job)
    return Draft("forced", cause, (), members, restore=True, ask=ask, why=numbers)


def _no_checkpoint(
    state: LeaderState, ready: tuple[Worker, ...], job: JobRecord, now: float
) -> Wait | Hopeless | None:
    """Why nothing can be restored yet: a job with progress never starts from scratch, and the node
    that holds the newest checkpoint gets time to come."""
    policy = state.policy
    newest = planning.newest_checkpoint(state.members, job)
    readable = _readable(state, ready, job)
    elsewhere = not (policy.alone or policy.shared_checkpoints)  # on a node that is not here
    if readable == newest and (newest is not None or job.iteration == 0):
        return _unregistered(state, ready, job, now) if newest is None and elsewhere else None
    progress = f"the job record holds progress (iteration {job.iteration}, generation {job.formed})"
    if readable is None and not elsewhere:
        return Hopeless(
            f"{progress}, but no live state and no verified checkpoint was found; not starting from "
            "scratch: make the checkpoints readable again, or start a new job with --fresh"
        )
    text = (
        f"the newest checkpoint {newest} is on no node that is ready, which read {readable} at most"
        if newest is not None
        else f"{progress}, but no node that is ready reads a checkpoint"
    )
    if readable is None:
        return Wait(
            "start_waits", f"{text}; not starting from scratch: start the node that holds it"
        )
    due_s = _holder_due_s(state, now)
    return Wait("start_waits", f"{text}; waiting for its holder", due_s) if now < due_s else None


def _unregistered(
    state: LeaderState, ready: tuple[Worker, ...], job: JobRecord, now: float
) -> Wait | None:
    """Where a generation was marked formed, one of its nodes may have trained and committed to its own disk
    while the store was away: it gets the time of a known holder, though nobody registered anything."""
    plan, due_s = state.plan, _holder_due_s(state, now)
    if plan is None or job.formed == 0 or now >= due_s:
        return None
    nodes = {m.key.node for m in (*plan.members, *plan.left_out)}
    away = sorted(nodes - {w.key.node for w in ready})
    if not away:
        return None
    text = f"generation {job.formed} was formed, and no node that is ready reads a checkpoint of it"
    return Wait("start_waits", f"{text}; waiting for {', '.join(away)}, which may hold one", due_s)


def _holder_due_s(state: LeaderState, now: float) -> float:
    """Until when whoever holds the newest checkpoint is waited for: while the store is away, nobody can
    come."""
    since_s = max(state.gather_at_s or now, state.loss_at_s or 0.0)  # a spare has waited since long
    return max(since_s, state.store_back_s) + state.policy.holder_wait_s


def _readable(
    state: LeaderState, ready: Sequence[Worker], job: JobRecord
) -> tuple[int, int] | None:
    """The newest checkpoint that one of these workers can read."""
    if state.policy.shared_checkpoints:
        return planning.newest_checkpoint(state.members, job)
    nodes = {w.key.node for w in ready}
    found = [planning.readable_checkpoint(m) for m in state.members if m.node in nodes]
    return max((c for c in found if c is not None), default=None)


def _choose(state: LeaderState, ready: tuple[Worker, ...], job: JobRecord) -> tuple[Worker, ...]:
    """Who begins: all but the spares, in their order, and in any case somebody who can read the newest
    checkpoint that any of them reads."""
    policy = state.policy
    wanted = min(planning.wanted_workers(policy, state.plan, job, 0), len(ready))
    most = planning.most_workers(policy, job)
    count = min(most, max(len(ready) - policy.spares, wanted, policy.min_workers, 1))
    chosen, rest = ready[:count], ready[count:]
    readable = _readable(state, ready, job)
    if _readable(state, chosen, job) == readable:
        return chosen
    holder = next(w for w in rest if _readable(state, (w,), job) == readable)
    return (*chosen[:-1], holder)


# --- planned ---------------------------------------------------------------------------------------


def _drain(state: LeaderState, view: View, plan: Plan) -> Draft | Wait | None:
    leaving = [w for w in view.heirs if w.draining and plan.find(w.key) is not None]
    if not leaving:
        return None
    names = ", ".join(str(w.key) for w in leaving)
    staying = tuple(w for w in view.heirs if not w.draining and plan.find(w.key) is not None)
    if not staying:
        return Wait(
            "drain_waits", f"{names} hold the only live state of the job; nobody can take it"
        )
    nodes = {w.key.node for w in leaving}
    notice = any(m.drain_cause == "notice" for m in state.members if m.node in nodes)
    newcomers = tuple(w for w in view.newcomers if plan.find(w.key) is not None)
    cause: ChangeCause = "notice" if notice else "drain"
    return Draft("planned", cause, staying, newcomers, why=f"{names} leave")


def _join(
    state: LeaderState, view: View, plan: Plan, job: JobRecord, now: float
) -> Draft | Wait | None:
    policy, waiting = state.policy, waiting_newcomers(view, plan)
    if not waiting:
        return None
    most = planning.most_workers(policy, job)
    room = most - plan.world_size
    numbers = f"{len(waiting)} ready, {plan.world_size} in generation {plan.generation}"
    if room <= 0:
        return Wait("join_waits", f"{numbers}: the job has its {most} workers")
    wanted = planning.wanted_workers(policy, plan, job, 0)
    # Where all members leave, spares come in to take their state over.
    leaving = sum(w.draining for w in view.heirs if plan.find(w.key) is not None)
    deficit = max(wanted, policy.min_workers) - (plan.world_size - leaving)
    count = min(room, max(len(waiting) - policy.spares, deficit))
    if count <= 0:
        return Wait("join_waits", f"{numbers}: {policy.spares} are kept as spares")
    entering = waiting[:count]
    if plan.world_size + len(entering) < policy.min_workers:
        return Wait("join_waits", f"{numbers}: the job holds below {policy.min_workers}")
    promoted = policy.spares > 0 and deficit > 0
    debounce_s = 0.0 if promoted else policy.join_debounce_s
    due_s = max((state.gather_at_s or now) + debounce_s, state.not_before_s)
    if now < due_s:
        return Wait("join_waits", f"{numbers}: others may come with them", due_s)
    members = tuple(w for w in view.heirs if plan.find(w.key) is not None)
    ask = tuple(w.key for w in entering)
    return Draft("planned", "join", members, entering, ask=ask, why=numbers)


def _reshape(state: LeaderState, view: View, plan: Plan, job: JobRecord) -> Draft | None:
    """What an operator has asked for: fewer workers, a pause or its end; or another end of the job, with
    which the supervisor of workers that train was started anew. All of it from the next safe point."""
    policy, most = state.policy, planning.most_workers(state.policy, job)
    staying = tuple(w for w in view.heirs if plan.find(w.key) is not None)[:most]
    newcomers = tuple(w for w in view.newcomers if plan.find(w.key) is not None)
    why = []
    if plan.world_size > most:
        why.append(f"scaled from {plan.world_size} to {most} workers")
    if plan.hold != (job.state == "paused" or len(staying) < policy.min_workers):
        why.append("resumed" if plan.hold else "paused")
    if (plan.iterations, plan.env_steps) != (policy.iterations, policy.env_steps):
        end = f"iteration {policy.iterations}, env step {policy.env_steps}"
        why.append(f"the job ends at {end} now (None: no bound)")
    if not why or not staying:
        return None
    return Draft("planned", "scale", staying, newcomers, why="; ".join(why))


# --- after the probe -------------------------------------------------------------------------------


def after_probe(
    state: LeaderState, view: View, draft: Draft, job: JobRecord, answers: Answers, now: float
) -> Due:
    """The draft without those who did not answer, or why that cannot be published."""
    if not draft.ask:
        return draft
    if draft.restore:
        return _start_answered(state, view, draft, job, answers, now)
    if draft.kind == "planned":
        return _join_answered(state, draft, answers, now)
    silent = [w.key for w in draft.heirs if w.key not in answers.answering]
    heirs = tuple(w for w in draft.heirs if w.key in answers.answering)
    heirs = tuple(w for w in heirs if not w.draining) or heirs
    if not heirs:
        text = f"{draft.why}; no survivor answers a probe: {_names(silent)}"
        return _ask_again("survivors_silent", text, now)
    heirs = heirs[: state.policy.max_workers]
    cause = draft.cause
    if silent and not view.lost:
        cause = "worker_lost" if answers.gone and not view.hung else "hang"
    why = f"{draft.why}; left out for not answering: {_names(silent)}" if silent else draft.why
    return replace(draft, heirs=heirs, cause=cause, why=why)


def _start_answered(
    state: LeaderState, view: View, draft: Draft, job: JobRecord, answers: Answers, now: float
) -> Draft | Wait:
    old = [key for key in view.unproven if key in answers.answering]
    train = state.plan is not None and _may_train(state.plan, job, answers)
    if old and (train or now < _patience_s(state)):
        text = f"no survivor is listed, but {_names(old)} of an earlier plan still answer"
        return _ask_again("start_waits", text, now)
    ready = tuple(w for w in draft.newcomers if w.key in answers.answering)
    if len(ready) < state.policy.min_workers:
        text = f"{len(ready)} of {len(draft.newcomers)} answer, {state.policy.min_workers} needed"
        return _ask_again("start_waits", text, now)
    if _readable(state, ready, job) != _readable(state, draft.newcomers, job):
        return _ask_again("start_waits", "nobody who reads the newest checkpoint answers", now)
    return replace(draft, newcomers=ready)


def may_have_trained(state: LeaderState, answers: Answers) -> bool:
    """Whether those of the plan may have been training until now: they still may, or this is the first
    that is heard of them since the loss."""
    plan, job = state.plan, state.job
    if plan is None or job is None:
        return False
    known = {m.key for m in (*plan.members, *plan.left_out)}
    first = state.loss_at_s is None or state.whole_at_s < state.loss_at_s
    return _may_train(plan, job, answers) or (first and not known.isdisjoint(answers.answering))


def _may_train(plan: Plan, job: JobRecord, answers: Answers) -> bool:
    """Whether workers of the plan may be training: all of them answer. Where one is gone or left out,
    no collective of the others can end. Until a planned one is formed its survivors train without its
    newcomers."""
    pending = plan.kind == "planned" and job.formed < plan.generation
    needed = plan.survivors if pending else tuple(m.key for m in plan.members)
    return answers.answering.issuperset(needed)


def _patience_s(state: LeaderState) -> float:
    """Until when a holder of the newest state that answers, but cannot train, may come back."""
    return state.whole_at_s + state.policy.holder_wait_s


def _join_answered(state: LeaderState, draft: Draft, answers: Answers, now: float) -> Draft | Wait:
    entering = tuple(w for w in draft.newcomers if w.key in answers.answering)
    if not entering or len(draft.heirs) + len(entering) < state.policy.min_workers:
        text = f"{len(entering)} of {len(draft.newcomers)} newcomers answer"
        return _ask_again("join_waits", text, now)
    return replace(draft, newcomers=entering)


def _ask_again(event: str, reason: str, now: float) -> Wait:
    return Wait(event, reason, now + ASK_AGAIN_S, ask_again_s=now + ASK_AGAIN_S)


def _names(keys: Sequence[WorkerKey]) -> str:
    return ", ".join(map(str, keys))
