"""The leader: who is in the next generation, and when. Works on member records of any nodes.

Events only bring the state up to date; then the same questions are asked of it, whatever came: is
the job over, is the plan formed, which change is due. At most one plan is being written at a time.
"""

from rallypoint.daemon.core import absence, changes, planning
from rallypoint.daemon.core.actions import (
    Explain,
    LeaderAction,
    MarkFormed,
    ProbeMembers,
    PublishPlan,
    RecordCheckpoint,
    SetJobState,
    SetTimer,
)
from rallypoint.daemon.core.changes import Due, Hopeless, Inquiry, Wait
from rallypoint.daemon.core.errors import InvalidTransition, remember
from rallypoint.daemon.core.events import (
    CollectivesEnded,
    JobChanged,
    LeaderElected,
    LeaderEvent,
    LeaderLost,
    MembersChanged,
    PlanChanged,
    ProbeAnswered,
    PublishRefused,
    StoreReturned,
    TimerFired,
)
from rallypoint.daemon.core.faults import program_error
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.leaderstate import Answers, LeaderState, Probe
from rallypoint.daemon.core.planning import Draft, View
from rallypoint.daemon.core.policy import LeaderPolicy
from rallypoint.daemon.core.records import JobRecord, JobState
from rallypoint.daemon.shared.plan import Plan, WorkerKey

Decision = tuple[LeaderState, tuple[LeaderAction, ...]]

_RECORD_AGAIN_S = 1.0


def initial(policy: LeaderPolicy) -> LeaderState:
    """A leader that is not elected yet."""
    return LeaderState(policy)


def decide(state: LeaderState, event: LeaderEvent, now: float) -> Decision:
    """What the leader does about one event at monotonic time ``now``.

    Raises `InvalidTransition` for any event before the first election, for an edited plan, for a
    formed mark that falls, and for the answer to a probe that was never sent. What still comes after
    the leader key was lost is ignored.
    """
    if isinstance(event, CollectivesEnded):  # often: nothing else changes
        state = replace(state, witness_generation=event.generation, witness_at_s=now)
        return state, ()
    if isinstance(event, StoreReturned):  # whoever is waited for could not come before
        return replace(state, store_back_s=now), ()
    state = replace(state, recent=remember(state.recent, event, now))
    if state.job is None and not isinstance(event, LeaderElected):
        if state.deposed:
            text = f"{type(event).__name__} after the leader key was lost"
            return state, (Explain("stale_event", text),)
        raise InvalidTransition(f"{type(event).__name__} before the election", state.recent)
    answers: Answers | None = None
    first: tuple[LeaderAction, ...] = ()
    match event:
        case LeaderElected():
            state = _elected(state, event, now)
        case LeaderLost():
            return _deposed(state), ()
        case MembersChanged(members=members):
            nodes = {member.node for member in members}
            given_up = frozenset(key for key in state.given_up if key.node not in nodes)
            state = absence.note(replace(state, members=members, given_up=given_up), now)
        case PlanChanged(plan=plan):
            state, first = _plan_changed(state, plan)
        case JobChanged(job=job):
            state = _job_changed(state, job)
        case ProbeAnswered():
            state, answers, first = _answered(state, event, now)
        case PublishRefused(generation=generation, reason=reason):
            state, first = _refused(state, generation, reason, now)
        case TimerFired():
            state = replace(state, timer_at_s=None)
    state, second = _consider(state, answers, now)
    return state, (*first, *second)


# --- events ------------------------------------------------------------------------------------


def _elected(state: LeaderState, event: LeaderElected, now: float) -> LeaderState:
    elected = LeaderState(
        policy=state.policy,
        members=event.members,
        plan=event.plan,
        job=event.job,
        elected_at_s=now,
        witness_generation=state.witness_generation,
        witness_at_s=state.witness_at_s,
        newest_generation=max(state.newest_generation, event.newest_known_generation),
        last_probe=state.last_probe,
        timer_at_s=state.timer_at_s,
        recent=state.recent,
    )
    return absence.note(elected, now)


def _deposed(state: LeaderState) -> LeaderState:
    """Somebody else may lead now; only numbers that must not come again are kept."""
    return LeaderState(
        policy=state.policy,
        deposed=True,
        witness_generation=state.witness_generation,
        witness_at_s=state.witness_at_s,
        newest_generation=state.newest_generation,
        last_probe=state.last_probe,
        recent=state.recent,
    )


def _plan_changed(state: LeaderState, plan: Plan) -> Decision:
    old = state.plan
    if old is not None and plan.generation <= old.generation:
        if plan.generation == old.generation and plan != old:
            raise InvalidTransition(
                f"two different plans of generation {plan.generation}: {old} and {plan}",
                state.recent,
            )
        text = f"plan {plan.generation} is not newer than {old.generation}"
        return state, (Explain("plan_known", text),)
    waits_for = state.publishing if state.publishing > plan.generation else 0
    state = replace(state, plan=plan, publishing=waits_for, marking=0)
    return replace(state, probe=None, loss_at_s=None, given_up=frozenset()), ()


def _job_changed(state: LeaderState, job: JobRecord) -> LeaderState:
    before = state.job
    if before is not None and job.formed < before.formed:
        raise InvalidTransition(
            f"job.formed fell from {before.formed} to {job.formed}", state.recent
        )
    formed = state.plan is not None and job.formed >= state.plan.generation
    return replace(
        state,
        job=job,
        marking=0 if job.formed >= state.marking else state.marking,
        retries=0 if formed else state.retries,
        ordered_state=None if job.state == state.ordered_state else state.ordered_state,
    )


def _answered(
    state: LeaderState, event: ProbeAnswered, now: float
) -> tuple[LeaderState, Answers | None, tuple[LeaderAction, ...]]:
    if event.probe > state.last_probe:
        raise InvalidTransition(f"answer to probe {event.probe}, never sent", state.recent)
    probe = state.probe
    if probe is None or event.probe != probe.number:
        text = f"answer to probe {event.probe}: a newer plan or probe made it idle"
        return state, None, (Explain("stale_event", text),)
    answers = Answers.of(probe, event)
    if changes.may_have_trained(state, answers):
        state = replace(state, whole_at_s=now)
    return replace(state, probe=None), answers, ()


def _refused(state: LeaderState, generation: int, reason: str, now: float) -> Decision:
    if generation not in (state.publishing, state.marking):
        text = f"refusal of generation {generation}, which is not being written"
        return state, (Explain("stale_event", text),)
    state = replace(
        state,
        publishing=0 if generation == state.publishing else state.publishing,
        marking=0 if generation == state.marking else state.marking,
        refused_until_s=now + state.back_off_s,
        retries=state.retries + 1,
    )
    return state, (Explain("publish_refused", f"generation {generation}: {reason}"),)


# --- what follows from the state -----------------------------------------------------------------


def _consider(state: LeaderState, answers: Answers | None, now: float) -> Decision:
    job = state.job
    if job is None or job.state in ("finished", "failed") or state.ordered_state is not None:
        return _rest(state, None)
    view = _survey(state, job, now)
    state, refusals = _refuse_devices(state, view)
    state, orders = _proceed(state, view, job, answers, now)
    return state, (*refusals, *orders)


def _refuse_devices(state: LeaderState, view: View) -> Decision:
    """Say once who cannot enter for its device."""
    text = "; ".join(map(str, view.clashing))
    if text == state.refused_devices:
        return state, ()
    advice = f"{text}: not planned in; give each slot a GPU of its own (node.devices)"
    return replace(state, refused_devices=text), (Explain("device_taken", advice),) if text else ()


def _proceed(
    state: LeaderState, view: View, job: JobRecord, answers: Answers | None, now: float
) -> Decision:
    over = _job_over(state)
    if over is not None and state.publishing:
        return state, ()  # that plan comes first: none may follow the end
    if over is not None:
        return _end_job(state, *over)
    state = _windows(state, view, now)
    if now < state.refused_until_s:
        return _rest(state, Wait("store_waits", "the store refused", state.refused_until_s))
    state, records = _record(state, job, now)
    state, marks = _mark(state, view, job)
    marks = (*records, *marks)
    if state.publishing:
        return state, marks
    if _stop_agreed(state):
        text = "workers left because a stop was agreed: no further generation"
        state, rest = _rest(state, Wait("stop_agreed", text))
        return state, (*marks, *rest)
    state, orders = _change(state, view, job, answers, now)
    return state, (*marks, *orders)


def _survey(state: LeaderState, job: JobRecord, now: float) -> View:
    elected = now < state.elected_at_s + state.policy.detect_s
    return planning.survey(state.members, state.plan, job, given_up=state.given_up, elected=elected)


def _record(state: LeaderState, job: JobRecord, now: float) -> Decision:
    """Order that the newest verified checkpoint is written where the next leader finds it."""
    newest = planning.newest_checkpoint(state.members, job)
    waits = newest == state.recording and now < state.record_again_s
    if newest is None or newest == job.checkpoint or waits:
        return state, ()
    state = replace(state, recording=newest, record_again_s=now + _RECORD_AGAIN_S)
    return state, (RecordCheckpoint(newest),)


def _job_over(state: LeaderState) -> tuple[JobState, str] | None:
    left = _left(state)
    if "finished" in left:
        return "finished", f"agreed by the members of generation {_generation(state)}"
    if "stopped" in left and not state.policy.alone:  # nodes that had no part in it end too
        text = f"stopped on request, agreed by the members of generation {_generation(state)}"
        return "finished", text
    error = program_error(state.members, state.plan)
    return None if error is None else ("failed", error)


def _left(state: LeaderState) -> set[str]:
    """Why members of the present plan that had trained left by agreement."""
    if state.plan is None:
        return set()
    return {
        slot.left
        for member in state.members
        for slot in member.slots
        if slot.left
        and slot.last_formed
        and state.plan.find(WorkerKey(member.node, slot.slot, slot.incarnation))
    }


def _stop_agreed(state: LeaderState) -> bool:
    return "stopped" in _left(state)


def _generation(state: LeaderState) -> int:
    return 0 if state.plan is None else state.plan.generation


def _mark(state: LeaderState, view: View, job: JobRecord) -> Decision:
    """Order the formed mark once every member of exactly this plan has formed it."""
    generation = _generation(state)
    busy = state.marking == generation or state.publishing
    if busy or job.formed >= generation or not view.all_formed:
        return state, ()
    return replace(state, marking=generation), (MarkFormed(generation),)


def _windows(state: LeaderState, view: View, now: float) -> LeaderState:
    """Open and close the windows in which losses, and newcomers, count as one."""
    loss = bool(view.lost or view.broken)
    gathers = bool(changes.waiting_newcomers(view, state.plan))
    return replace(
        state,
        loss_at_s=(now if state.loss_at_s is None else state.loss_at_s) if loss else None,
        gather_at_s=(now if state.gather_at_s is None else state.gather_at_s) if gathers else None,
    )


def _change(
    state: LeaderState, view: View, job: JobRecord, answers: Answers | None, now: float
) -> Decision:
    """Carry the change that is due one step on: wait, probe, or publish."""
    due: Due = changes.next_change(state, view, job, now)
    if isinstance(due, Draft | Inquiry) and due.ask:
        if state.probe is not None and set(due.ask) <= set(state.probe.targets):
            return _rest(state, None)  # asked already; the answer will come
        if answers is None or not answers.asked.issuperset(due.ask):
            return _ask(state, due.ask)
        if isinstance(due, Inquiry):
            return _judge_absent(state, job, answers, now)
        due = changes.after_probe(state, view, due, job, answers, now)
    if isinstance(due, Hopeless):
        return _end_job(state, "failed", due.reason)
    if isinstance(due, Draft):
        return _publish(state, due, job, now)
    wait = due if isinstance(due, Wait) else None
    if wait is not None and wait.ask_again_s is not None:
        state = replace(state, not_before_s=max(state.not_before_s, wait.ask_again_s))
    return _rest(state, wait)


def _judge_absent(state: LeaderState, job: JobRecord, answers: Answers, now: float) -> Decision:
    state = replace(
        state,
        given_up=state.given_up - answers.asked | absence.lost(state, job, answers, now),
        given_up_at_s=now,
        inquire_after_s=absence.ask_again_s(state, job, now),
    )
    view = _survey(state, job, now)
    state = _windows(state, view, now)
    return _change(state, view, job, None, now)


def _ask(state: LeaderState, targets: tuple[WorkerKey, ...]) -> Decision:
    probe = Probe(state.last_probe + 1, targets)
    state = replace(state, probe=probe, last_probe=probe.number, timer_at_s=None)
    return state, (ProbeMembers(probe.number, probe.targets, state.policy.probe_s),)


def _publish(state: LeaderState, draft: Draft, job: JobRecord, now: float) -> Decision:
    generation = planning.next_generation(state.newest_generation, state.members, state.plan, job)
    plan = planning.build_plan(state.policy, draft, generation, state.plan, job, state.members)
    if draft.kind == "forced":
        unformed = state.plan is not None and job.formed < state.plan.generation
        state = replace(state, retries=state.retries + 1 if unformed else 0)
        state = replace(state, not_before_s=now + state.back_off_s)
    replaces = _generation(state)
    state = replace(state, newest_generation=generation, publishing=generation, probe=None, said="")
    held = ", holding" if plan.hold else ""
    text = (
        f"generation {generation} ({plan.kind}, {plan.cause}{held}): {len(plan.survivors)} survivors, "
        f"{plan.world_size - len(plan.survivors)} newcomers; {draft.why}"
    )
    return state, (Explain("plan", text), PublishPlan(plan, replaces))


def _end_job(state: LeaderState, job_state: JobState, reason: str) -> Decision:
    return replace(state, ordered_state=job_state), (SetJobState(job_state, reason),)


def _rest(state: LeaderState, wait: Wait | None) -> Decision:
    """Say once why nothing is done, and come back when the time alone will change that."""
    actions: list[LeaderAction] = []
    if wait is not None and wait.reason != state.said:
        actions.append(Explain(wait.event, wait.reason))
    state = replace(state, said="" if wait is None else wait.reason)
    at_s = None if wait is None else wait.at_s
    if at_s is not None and at_s != state.timer_at_s:
        actions.append(SetTimer(at_s))
    return replace(state, timer_at_s=at_s), tuple(actions)
