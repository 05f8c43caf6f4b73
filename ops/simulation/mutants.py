"""The production decisions with one rule left out. Each must be found by the simulation: a rule that can
be left out unnoticed is either not needed or not tested."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from rallypoint.daemon.core import changes, joining, leader, permission, planning
from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.shared.plan import Plan, WorkerKey

Wrapped = Callable[..., Any]
Make = Callable[[Wrapped], Wrapped]


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Leave the rule of this name out, until the end of the block."""
    owner, attribute, make = MUTANTS[name]
    original = getattr(owner, attribute)
    setattr(owner, attribute, make(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def _plan(**changed: Any) -> Make:
    """`build_plan`, with some fields of every plan overwritten."""

    def make(build: Wrapped) -> Wrapped:
        return lambda *args: msgspec.structs.replace(build(*args), **changed)

    return make


def _view(change: Callable[[planning.View], planning.View]) -> Make:
    """`survey`, with something left out of every view."""

    def make(survey: Wrapped) -> Wrapped:
        return lambda *args, **kwargs: change(survey(*args, **kwargs))

    return make


def _newcomers_first(build: Wrapped) -> Wrapped:
    def reversed_ranks(policy: Any, draft: planning.Draft, *rest: Any) -> Plan:
        plan: Plan = build(policy, draft, *rest)
        members = (*plan.members[len(draft.heirs) :], *plan.members[: len(draft.heirs)])
        ranked = tuple(
            msgspec.structs.replace(member, rank=rank) for rank, member in enumerate(members)
        )
        return msgspec.structs.replace(plan, members=ranked)

    return reversed_ranks


def _forced_with_newcomers(forced: Wrapped) -> Wrapped:
    def make(view: planning.View, *rest: Any) -> planning.Draft:
        draft: planning.Draft = forced(view, *rest)
        return replace(draft, newcomers=view.newcomers)

    return make


def _any_formed(worker: Wrapped) -> Wrapped:
    def make(*args: Any, **kwargs: Any) -> planning.Worker:
        found: planning.Worker = worker(*args, **kwargs)
        return replace(found, heir=found.record.last_formed > 0)

    return make


def _silent_stay(after_probe: Wrapped) -> Wrapped:
    def make(state: Any, view: Any, draft: planning.Draft, *rest: Any) -> changes.Due:
        if draft.kind == "forced" and not draft.restore:
            return replace(draft, heirs=draft.heirs[: state.policy.max_workers])
        due: changes.Due = after_probe(state, view, draft, *rest)
        return due

    return make


def _allow_all(refusal: Wrapped) -> Wrapped:
    return lambda state, key, generation, now: ""


def _never_past_lease(past_lease: Wrapped) -> Wrapped:
    def make(state: NodeState, now: float) -> bool:
        return False

    return make


def _same_number(next_generation: Wrapped) -> Wrapped:
    def make(newest: int, members: Any, plan: Plan | None, job: Any) -> int:
        return int(job.formed) + 1

    return make


def _lost_at_once(training: Wrapped) -> Wrapped:
    def make(*args: Any, **kwargs: Any) -> frozenset[WorkerKey]:
        return frozenset()

    return make


def _join_early(next_change: Wrapped) -> Wrapped:
    def make(state: Any, view: planning.View, job: Any, now: float) -> changes.Due:
        due = next_change(state, view, job, now)
        if due is None and state.plan is not None and job.formed < state.plan.generation:
            return changes._join(state, view, state.plan, job, now)
        return due  # type: ignore[no-any-return]

    return make


def _asks_nobody_else(start: Wrapped) -> Wrapped:
    def make(*args: Any) -> changes.Due:
        due: changes.Due = start(*args)
        if isinstance(due, planning.Draft):
            return replace(due, ask=tuple(w.key for w in due.newcomers))
        return due

    return make


def _first_ready(choose: Wrapped) -> Wrapped:
    def make(state: Any, ready: tuple[planning.Worker, ...], job: Any) -> Any:
        return ready[: len(choose(state, ready, job))]

    return make


def _nothing(rule: Wrapped) -> Wrapped:
    return lambda *args, **kwargs: None


def _any_checkpoint(no_checkpoint: Wrapped) -> Wrapped:
    def make(state: Any, ready: Any, job: Any, now: float) -> Any:
        if changes._readable(state, ready, job) is not None:
            return None
        return no_checkpoint(state, ready, job, now)

    return make


def _nobody_given_up(judge_absent: Wrapped) -> Wrapped:
    def make(state: Any, job: Any, answers: Any, now: float) -> Any:
        return judge_absent(state, job, replace(answers, asked=answers.answering), now)

    return make


def _only_errors(job_over: Wrapped) -> Wrapped:
    def make(state: Any) -> Any:
        over = job_over(state)
        return over if over is not None and over[0] == "failed" else None

    return make


def _any_fault(program_error: Wrapped) -> Wrapped:
    def make(members: Any, plan: Any) -> str | None:
        faults = [slot.fault for member in members for slot in member.slots if slot.fault]
        return faults[0].traceback if faults else None

    return make


MUTANTS: Final[dict[str, tuple[Any, str, Make]]] = {
    # rule 1
    "number_used_again": (planning, "next_generation", _same_number),
    # rule 2
    "commit_past_lease_or_left_out": (permission, "commit_refusal", _allow_all),
    "lease_never_ends": (NodeState, "past_lease", _never_past_lease),
    "silence_is_loss": (planning, "_training_members", _lost_at_once),
    # rule 3
    "newcomer_ranks_first": (planning, "build_plan", _newcomers_first),
    # rule 4
    "forced_admits_newcomers": (changes, "_forced", _forced_with_newcomers),
    "silent_are_not_left_out": (changes, "after_probe", _silent_stay),
    "joins_before_formed": (changes, "next_change", _join_early),
    # rule 5
    "no_hold": (planning, "build_plan", _plan(hold=False)),
    # formed mark, restores
    "mark_is_ignored": (planning, "_worker", _any_formed),
    "marked_when_anybody_formed": (
        planning,
        "survey",
        _view(lambda view: replace(view, all_formed=view.all_formed or view.begun)),
    ),
    "no_commit_first": (planning, "build_plan", _plan(commit_first=False)),
    "restore_asks_nobody": (changes, "_start", _asks_nobody_else),
    "left_out_is_forgotten": (planning, "build_plan", _plan(left_out=())),
    # rule 11
    "holder_is_not_chosen": (changes, "_choose", _first_ready),
    "holder_is_not_awaited": (changes, "_no_checkpoint", _any_checkpoint),
    "starts_from_scratch": (changes, "_no_checkpoint", _nothing),
    "checkpoint_is_not_recorded": (
        leader,
        "_record",
        lambda _: lambda state, job, now: (state, ()),
    ),
    # several nodes
    "absent_are_never_lost": (leader, "_judge_absent", _nobody_given_up),
    # rules 6 and 8
    "agreed_end_is_not_written": (leader, "_job_over", _only_errors),
    "program_error_is_restarted": (leader, "program_error", _nothing),
    "any_exception_is_a_program_error": (leader, "program_error", _any_fault),
    "ended_job_begins_again": (joining, "ends_now", lambda _: lambda job, others: False),
}
"""Name -> (where, attribute, what it becomes)."""
