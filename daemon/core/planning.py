"""Reading member records and building plans: pure functions without memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rallypoint.daemon.core.joining import differences
from rallypoint.daemon.core.policy import LeaderPolicy
from rallypoint.daemon.core.records import JobRecord, MemberRecord, SlotRecord, WorkerState
from rallypoint.daemon.shared import envbudget
from rallypoint.daemon.shared.plan import ChangeCause, ChangeKind, Plan, PlannedWorker, WorkerKey

_WARM: frozenset[WorkerState] = frozenset(
    {"ready", "training", "rebuilding", "waiting", "draining"}
)
_GONE: frozenset[WorkerState] = frozenset({"stopped", "lost", "quarantined"})


@dataclass(frozen=True)
class Worker:
    """A worker that lives and is past warm-up, as its node recorded it."""

    key: WorkerKey
    record: SlotRecord
    host: str
    draining: bool
    """Its node drains."""
    admitted: bool
    """Its node may be let in: it agrees with the job and is not quarantined."""
    heir: bool
    """It formed a generation not older than the newest one marked formed, so its state counts. Among
    heirs those of the newest generation are the survivors; a heir behind them was in the group that
    broke before everybody had said that it formed, and takes the survivors' state if it differs."""


@dataclass(frozen=True)
class Clash:
    """A worker whose device is taken. Two on one GPU would share its memory and time, and NCCL refuses
    such a group."""

    refused: WorkerKey
    holder: WorkerKey
    """Who has it: an heir, or the earlier one of two newcomers."""
    device: str

    def __str__(self) -> str:
        return f"{self.refused} has the same device as {self.holder}, {self.device}"


@dataclass(frozen=True)
class View:
    """What the member records say, seen against the present plan."""

    heirs: tuple[Worker, ...]
    """Newest formed generation first, then by rank in the present plan."""
    newcomers: tuple[Worker, ...]
    """Not heirs, not draining; slots of one node adjacent, then in the order they became ready."""
    lost: tuple[WorkerKey, ...]
    """Members of the plan that are gone, or that left."""
    nodes_lost: bool
    """Some member is lost because its whole node is."""
    hung: bool
    """Some member is, or was, ended because it hung, or nothing moved in this generation. That it has ended
    may be seen by its peers before its own node says so."""
    broken: tuple[WorkerKey, ...]
    """Members that live but reported exactly this generation broken; or, in a planned change, that
    formed the generation before it and will never see that one marked: it is superseded; or wait
    in the generation before it, which stands still."""
    clashing: tuple[Clash, ...]
    """Newcomers that cannot enter: their device is another worker's."""
    absent: tuple[WorkerKey, ...]
    """Members of a generation that trains whose node has no record: it has lost its lease, or a new
    leader has not read it yet. Silence of a supervisor alone proves no loss."""
    unproven: tuple[WorkerKey, ...]
    """Who may hold the newest formed state, is not known to live, and is not recorded as gone."""
    begun: bool
    """Some member has formed this generation, or broken in it."""
    all_formed: bool
    """Every member of exactly this plan has formed it."""
    expected: int
    """Slots of nodes that do not drain in which a worker lives or is about to."""


def survey(
    members: Sequence[MemberRecord],
    plan: Plan | None,
    job: JobRecord,
    *,
    given_up: frozenset[WorkerKey] = frozenset(),
    elected: bool = False,
) -> View:
    """Sort the workers of all member records by what they mean to the next plan. ``given_up``: absent
    members that are taken for lost. ``elected``: the leader is new, and nodes may still register."""
    workers = {w.key: w for member in members for w in _workers(member, plan, job)}
    planned = () if plan is None else tuple(m.key for m in plan.members)
    generation = 0 if plan is None else plan.generation
    known = {(m.node, s.slot): (m, s) for m in members for s in m.slots}
    heirs = _by_seniority((w for w in workers.values() if w.heir), planned)
    newcomers, clashing = _newcomers(workers.values(), heirs, frozenset(planned))
    nodes = {m.node for m in members}
    present = [workers[key] for key in planned if key in workers]
    begun = any(
        max(w.record.last_formed, w.record.broken_generation) >= generation for w in present
    )
    trains = () if plan is None else _training_members(plan, job, begun=begun, elected=elected)
    absent = tuple(
        key
        for key in planned
        if key not in workers and key.node not in nodes and key in trains and key not in given_up
    )
    lost = tuple(key for key in planned if key not in workers and key not in absent)
    return View(
        heirs=heirs,
        newcomers=newcomers,
        clashing=clashing,
        lost=lost,
        nodes_lost=any((key.node, key.slot) not in known for key in lost),
        hung=any(
            key.incarnation == known[key.node, key.slot][1].hung_incarnation
            for key in planned
            if (key.node, key.slot) in known
        )
        or (plan is not None and any(_stands_still(w, plan, job) for w in present)),
        broken=tuple(w.key for w in present if _is_broken(w, plan, job)),
        absent=absent,
        unproven=tuple(
            m.key for m in _suspects(plan, job) if (m.key.node, m.key.slot) not in known
        ),
        begun=begun,
        all_formed=bool(planned)
        and not lost
        and not absent
        and all(w.record.last_formed == generation for w in present),
        expected=sum(slot.state not in _GONE for m, slot in known.values() if not m.draining)
        - len(clashing),
    )


def _newcomers(
    workers: Iterable[Worker], heirs: tuple[Worker, ...], planned: frozenset[WorkerKey]
) -> tuple[tuple[Worker, ...], tuple[Clash, ...]]:
    """Who may enter, in order, and whose device is taken by one before it."""
    found = sorted(
        (w for w in workers if not w.heir and _may_enter(w)),
        key=lambda w: (w.key.node, w.record.ready_order, w.key.slot),
    )
    first = [w for w in found if w.key in planned]
    clashing = _clashes((*heirs, *first, *(w for w in found if w.key not in planned)))
    refused = {clash.refused for clash in clashing}
    return tuple(w for w in found if w.key not in refused), clashing


def _clashes(workers: Iterable[Worker]) -> tuple[Clash, ...]:
    """Those whose GPU a worker before them has already. CPU shares are nobody's own."""
    holders: dict[str, WorkerKey] = {}
    found = []
    for worker in workers:
        device = worker.record.device
        holder = holders.setdefault(device, worker.key)
        if device not in ("", "cpu") and holder != worker.key:
            found.append(Clash(worker.key, holder, device))
    return tuple(found)


def _training_members(
    plan: Plan, job: JobRecord, *, begun: bool, elected: bool
) -> frozenset[WorkerKey]:
    """Members that may be training although their node is silent: the generation is formed, or a
    planned one has not begun, and its survivors train on in the one before."""
    if plan.generation <= job.formed or elected:
        return frozenset(m.key for m in plan.members)
    return frozenset(plan.survivors if plan.kind == "planned" and not begun else ())


def _suspects(plan: Plan | None, job: JobRecord) -> tuple[PlannedWorker, ...]:
    if plan is None:
        return ()
    return plan.members if plan.generation <= job.formed else (*plan.members, *plan.left_out)


def still_left_out(
    plan: Plan | None, job: JobRecord, members: Sequence[MemberRecord], entering: set[WorkerKey]
) -> tuple[PlannedWorker, ...]:
    """Who may hold the newest formed state, but is not among ``entering``: `Plan.left_out`. A newcomer
    of a plan that is not marked formed is one of them: it may have formed, and its node been silent since."""
    slots = {(m.node, s.slot): s for m in members for s in m.slots}
    holders = _suspects(plan, job)
    return tuple(m for m in holders if m.key not in entering and not _is_gone(m.key, slots))


def _is_gone(key: WorkerKey, slots: Mapping[tuple[str, int], SlotRecord]) -> bool:
    record = slots.get((key.node, key.slot))
    if record is None:
        return False
    return record.incarnation != key.incarnation or record.state in _GONE or bool(record.left)


def _workers(member: MemberRecord, plan: Plan | None, job: JobRecord) -> list[Worker]:
    admitted = not member.quarantined and not differences(job, member)
    warm = (slot for slot in member.slots if slot.state in _WARM and not slot.left)
    return [_worker(member, slot, plan, job, admitted=admitted) for slot in warm]


def _worker(
    member: MemberRecord, slot: SlotRecord, plan: Plan | None, job: JobRecord, *, admitted: bool
) -> Worker:
    key = WorkerKey(member.node, slot.slot, slot.incarnation)
    marked = plan is not None and slot.last_formed < plan.generation <= job.formed
    if plan is not None and marked and plan.find(key) is not None:
        # All members have formed what is marked. Its supervisor, just started, may have read less.
        slot = replace(slot, last_formed=plan.generation)
    return Worker(
        key=key,
        record=slot,
        host=slot.host or member.advertise,
        draining=member.draining,
        admitted=admitted,
        heir=slot.last_formed >= max(1, job.formed),
    )


def _is_broken(worker: Worker, plan: Plan | None, job: JobRecord) -> bool:
    if plan is None:
        return False
    superseded = plan.kind == "planned" and job.formed < worker.record.last_formed < plan.generation
    if superseded or _stands_still(worker, plan, job):
        return True
    return worker.record.broken_generation == plan.generation


def _stands_still(worker: Worker, plan: Plan, job: JobRecord) -> bool:
    """Whether all wait for each other in this generation, or in the one that a planned one follows."""
    pending = plan.kind == "planned" and 0 < job.formed < plan.generation
    return worker.record.stuck_generation in (plan.generation, job.formed if pending else -1)


def _may_enter(worker: Worker) -> bool:
    return worker.admitted and not worker.draining and worker.record.state != "draining"


def _by_seniority(workers: Iterable[Worker], planned: tuple[WorkerKey, ...]) -> tuple[Worker, ...]:
    """Newest formed generation first, then rank in the present plan, then place."""
    rank = {key: rank for rank, key in enumerate(planned)}
    return tuple(
        sorted(
            workers,
            key=lambda w: (-w.record.last_formed, rank.get(w.key, len(rank)), w.key),
        )
    )


# --- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A change that is due: who is to be in the next generation, if they answer."""

    kind: ChangeKind
    cause: ChangeCause
    heirs: tuple[Worker, ...]
    newcomers: tuple[Worker, ...] = ()
    restore: bool = False
    ask: tuple[WorkerKey, ...] = ()
    """Whom to probe before this is published."""
    why: str = ""


def restoring_generation(plan: Plan | None, job: JobRecord) -> int:
    """The newest generation that restored, whether or not the job record shows it yet."""
    return max(job.restore_generation, plan.generation if plan is not None and plan.restore else 0)


def newest_checkpoint(members: Sequence[MemberRecord], job: JobRecord) -> tuple[int, int] | None:
    """(generation, iteration) of the newest verified checkpoint that anybody ever registered."""
    recorded = [c for m in members for c in (m.checkpoint, *(s.checkpoint for s in m.slots))]
    return max((c for c in (job.checkpoint, *recorded) if c is not None), default=None)


def readable_checkpoint(member: MemberRecord) -> tuple[int, int] | None:
    """The newest one that workers of this node can read."""
    recorded = (member.checkpoint, *(s.checkpoint for s in member.slots))
    return max((c for c in recorded if c is not None), default=None)


def next_generation(
    newest: int, members: Sequence[MemberRecord], plan: Plan | None, job: JobRecord
) -> int:
    """1 + the greatest number that anybody knows."""
    recorded = [
        number
        for member in members
        for slot in member.slots
        for number in (slot.last_formed, slot.broken_generation, (slot.checkpoint or (0, 0))[0])
    ]
    recorded += [member.newest_generation for member in members]
    recorded += [(c or (0, 0))[0] for c in (job.checkpoint, *(m.checkpoint for m in members))]
    planned = 0 if plan is None else plan.generation
    return 1 + max(newest, planned, job.formed, job.restore_generation, *recorded, 0)


def most_workers(policy: LeaderPolicy, job: JobRecord) -> int:
    """Largest world size: that of the configuration, or what an operator has scaled the job to."""
    asked = policy.max_workers if job.workers is None else max(policy.min_workers, job.workers)
    return min(policy.max_workers, asked)


def wanted_workers(policy: LeaderPolicy, plan: Plan | None, job: JobRecord, count: int) -> int:
    """World size that spares make up for, of a plan of ``count`` workers after ``plan``: a loss does not
    lower it, an operator may."""
    if job.workers is not None:
        return most_workers(policy, job)
    return min(policy.max_workers, max(0 if plan is None else plan.wanted_workers, count))


def build_plan(
    policy: LeaderPolicy,
    draft: Draft,
    generation: int,
    plan: Plan | None,
    job: JobRecord,
    members: Sequence[MemberRecord],
) -> Plan:
    """The plan of a draft: ranks in the draft's order, heirs before newcomers, and env blocks.
    ``plan`` is the one before.

    Raises `BudgetError` when the envs do not divide among them (checked before anything starts).
    """
    workers = (*draft.heirs, *draft.newcomers)
    blocks = _blocks(policy, draft)
    checkpoint = newest_checkpoint(members, job)
    restored = restoring_generation(plan, job)
    uncovered = restored > 0 and (checkpoint is None or checkpoint[0] < restored)
    return Plan(
        generation=generation,
        kind=draft.kind,
        cause=draft.cause,
        formed=job.formed,
        restore=draft.restore,
        hold=job.state == "paused" or len(workers) < policy.min_workers,
        commit_first=draft.restore or uncovered,
        budget_envs=policy.num_envs,
        members=tuple(
            PlannedWorker(
                key=worker.key,
                rank=rank,
                host=worker.host,
                port=worker.record.port,
                blocks=blocks[worker.key],
                capacity_envs=worker.record.capacity_envs,
            )
            for rank, worker in enumerate(workers)
        ),
        survivors=tuple(worker.key for worker in draft.heirs),
        left_out=still_left_out(plan, job, members, {worker.key for worker in workers}),
        wanted_workers=wanted_workers(policy, plan, job, len(workers)),
        resumes=job.iteration > 0 or checkpoint is not None,
        lineage=generation if draft.restore or plan is None else plan.lineage,
        warm_start=job.warm_start,
        iterations=policy.iterations,
        env_steps=policy.env_steps,
    )


def _blocks(policy: LeaderPolicy, draft: Draft) -> dict[WorkerKey, tuple[int, ...]]:
    """Heirs keep what they hold (the more senior where two claim a block); the budget says the rest, up to what
    each can hold."""
    held: dict[WorkerKey, tuple[int, ...]] = {}
    taken: set[int] = set()
    for worker in draft.heirs:
        held[worker.key] = tuple(b for b in worker.record.blocks if b not in taken)
        taken.update(worker.record.blocks)
    order = [worker.key for worker in (*draft.heirs, *draft.newcomers)]
    count = policy.num_envs // policy.block
    most = {
        worker.key: worker.record.capacity_envs // policy.block
        for worker in (*draft.heirs, *draft.newcomers)
        if worker.record.capacity_envs
    }
    if policy.budget == "per_rank":
        return envbudget.assign_per_rank(held, order, count, most)
    return envbudget.assign_global(held, order, count, move=draft.kind == "planned", most=most)
