"""Telling a worker that hangs from one that is waited for (DESIGN 4.9), from readings of slot pages.

A worker's *position* is (generation, collectives entered in it). *Inside* means that it waits for the
other members. Who is silent past the bound of its phase, not inside, and not ahead of somebody who
waits is hung; so is who does not follow a forced plan, which ends every wait of an older generation.
When all are inside and nothing moves, nobody is to blame: the generation is to be formed anew.

Pages are read on their own node only. So a node says in its member record where its workers wait, once
they have for long (`waits`), and every node holds its own workers, and only those, against what the
others say. That is late by a second or two, which is no harm: a wait that others have entered later
than ours says nothing of ours, and one that is over lies behind it.

Silence is counted in steps of this node's own clock, none longer than two intervals: were all of us
frozen together, nobody has been silent. Bounds are learned: three times what was measured in the same
phase of this run, and at least ``hang_s``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from rallypoint.daemon.core.records import MemberRecord, WaitRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotCounters

FACTOR: Final = 3.0
"""The bound of a phase over the longest silence that was measured in it."""
SAMPLES: Final = 64
"""Silences remembered for each phase."""
COLLECTIVE: Final = "collective"
"""Name under which waits are learned in which all members were inside."""
WAIT: Final = "wait"
"""Name under which all waits are learned that ended by themselves."""


@dataclass(frozen=True)
class LivenessPolicy:
    """Bounds, in seconds."""

    hang_s: float
    """Least silence that is a hang."""
    interval_s: float
    """Time between readings."""

    @property
    def settle_s(self) -> float:
        """How long somebody must have waited before another is ended for it; also the time that a
        member has to follow a forced plan."""
        return self.hang_s / 4


@dataclass(frozen=True)
class Track:
    """What is known of one life of a worker."""

    counters: SlotCounters
    quiet_s: float = 0.0
    """Since it last showed that it gets on."""
    inside_s: float = 0.0
    """Inside of one and the same wait for this long, as far as readings show."""

    @property
    def position(self) -> tuple[int, int]:
        return self.counters.generation, self.counters.collective

    @property
    def inside(self) -> bool:
        return self.counters.inside

    @property
    def phase(self) -> str:
        return self.counters.phase


@dataclass(frozen=True)
class Elsewhere:
    """A worker of another node that waits, as that node's record says it."""

    said: WaitRecord
    waited_s: float
    """At least this long in one and the same wait."""

    @property
    def position(self) -> tuple[int, int]:
        return self.said.generation, self.said.collective


@dataclass(frozen=True)
class LivenessState:
    """What all readings so far have shown."""

    at_s: float | None = None
    tracks: Mapping[WorkerKey, Track] = field(default_factory=lambda: MappingProxyType({}))
    all_inside_s: float = 0.0
    """For this long every worker has been inside and nothing moved."""
    silences: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Newest silences that ended by themselves, by phase."""
    elsewhere: Mapping[WorkerKey, Elsewhere] = field(default_factory=lambda: MappingProxyType({}))
    """Workers of other nodes that wait."""


@dataclass(frozen=True)
class Hung:
    """This worker, and it alone, is to be ended."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class Stuck:
    """All members wait in the same generation and nothing moves: it is to be formed anew."""

    generation: int
    reason: str


Verdict = tuple[Hung, ...] | Stuck


def observe(
    state: LivenessState,
    policy: LivenessPolicy,
    readings: Mapping[WorkerKey, SlotCounters],
    now: float,
    others: Sequence[MemberRecord] = (),
) -> LivenessState:
    """The state after a reading, at monotonic time ``now``, of the pages of all workers that somebody
    counts on. Others are forgotten. ``others``: the present records of all other nodes."""
    step_s = 0.0 if state.at_s is None else min(now - state.at_s, 2 * policy.interval_s)
    silences = dict(state.silences)
    tracks: dict[WorkerKey, Track] = {}
    for key, counters in readings.items():
        if counters.incarnation != key.incarnation or not counters.touched_ns:
            continue  # it has not begun to write
        before = state.tracks.get(key)
        tracks[key] = _follow(before, counters, step_s, now)
        if before is not None and not before.inside and not _same(before, counters):
            _learn(silences, before.phase, before.quiet_s)
        if before is not None and before.inside and _left_wait(before, counters):
            _learn(silences, WAIT, before.inside_s)
    still = bool(tracks) and all(
        track.inside and _same(state.tracks.get(key), track.counters)
        for key, track in tracks.items()
    )
    if not still and state.all_inside_s and not _released(state.tracks, tracks):
        _learn(silences, COLLECTIVE, state.all_inside_s)
    return LivenessState(
        at_s=now,
        tracks=MappingProxyType(tracks),
        all_inside_s=state.all_inside_s + step_s if still else 0.0,
        silences=MappingProxyType(silences),
        elsewhere=MappingProxyType(dict(_heard(state, others, step_s))),
    )


def _heard(
    state: LivenessState, others: Sequence[MemberRecord], step_s: float
) -> Iterator[tuple[WorkerKey, Elsewhere]]:
    for member in others:
        for said in member.waits:
            key = WorkerKey(member.node, said.slot, said.incarnation)
            before = state.elsewhere.get(key)
            if before is not None and before.said == said:
                yield key, Elsewhere(said, before.waited_s + step_s)
            else:
                yield key, Elsewhere(said, said.waited_s)


def _released(before: Mapping[WorkerKey, Track], now: Mapping[WorkerKey, Track]) -> bool:
    """Some wait was ended by a newer generation, also one without that worker, or by its death: how long
    it took is no measure of a sound one. Else a node that was cut off would learn from the outage."""
    return any(k not in now or now[k].position[0] != t.position[0] for k, t in before.items())


def _left_wait(before: Track, counters: SlotCounters) -> bool:
    """Its wait ended by itself."""
    entered = counters.generation, counters.collective
    same = counters.inside and before.position == entered
    return not same and before.position[0] == counters.generation


def _same(before: Track | None, counters: SlotCounters) -> bool:
    """It has not got on since the reading before."""
    return before is not None and before.counters.touched_ns == counters.touched_ns


def _follow(before: Track | None, counters: SlotCounters, step_s: float, now: float) -> Track:
    if before is None:
        return Track(counters)
    since_s = max(0.0, now - counters.touched_ns / 1e9)
    stays = (
        before.inside
        and counters.inside
        and before.position == (counters.generation, counters.collective)
        and before.phase == counters.phase
    )
    return Track(
        counters,
        quiet_s=before.quiet_s + step_s if _same(before, counters) else min(since_s, step_s),
        inside_s=before.inside_s + step_s if stays else 0.0,
    )


def _learn(silences: dict[str, tuple[float, ...]], phase: str, quiet_s: float) -> None:
    silences[phase] = (*silences.get(phase, ()), quiet_s)[-SAMPLES:]


def bound_s(state: LivenessState, policy: LivenessPolicy, phase: str) -> float:
    """The silence past which a worker in this phase hangs. The second longest that was measured
    counts, so that one freeze that passed does not make the next one wait for long."""
    phases = (phase, "warming") if phase == "envs" else (phase,)  # warm-up builds envs too
    measured = (sorted(state.silences.get(name, ()))[-2:] for name in phases)
    return max(policy.hang_s, *(FACTOR * (longest[0] if longest else 0.0) for longest in measured))


def asks(state: LivenessState, policy: LivenessPolicy, plan: Plan, leader: str) -> bool:
    """Whether what other nodes say can matter now. A worker of ours is silent, not waiting, for half of
    the shortest bound; or it is left behind; or it has waited for so long that the node that leads, and
    always knows what others say, should have ended it, unless that has no worker that waits too."""
    behind_s = policy.settle_s if plan.kind == "forced" else math.inf
    late_s = _unusual_s(state, policy)
    if plan.lists(leader):
        late_s = 1.5 * bound_s(state, policy, COLLECTIVE)
    for track in state.tracks.values():
        bound = behind_s if track.position[0] < plan.generation else late_s
        if track.inside_s > bound if track.inside else track.quiet_s > policy.hang_s / 2:
            return True
    return False


def waits(
    state: LivenessState,
    policy: LivenessPolicy,
    members: Sequence[WorkerKey],
    before: Sequence[WaitRecord],
) -> tuple[WaitRecord, ...]:
    """What this node's record is to say of ``members``, its workers that others count on: who waits for
    longer than is usual. ``before``: what it says now; who has not moved since stays as it is there."""
    bound = _unusual_s(state, policy)
    found = []
    for key in members:
        track = state.tracks.get(key)
        if track is None or not track.inside or track.inside_s < bound:
            continue
        said = WaitRecord(key.slot, key.incarnation, *track.position, track.inside_s)
        known = (w for w in before if _place(w) == _place(said) and w.waited_s <= said.waited_s)
        found.append(next(known, said))
    return tuple(found)


def _unusual_s(state: LivenessState, policy: LivenessPolicy) -> float:
    """Waits longer than this are worth a word."""
    longest = sorted(state.silences.get(WAIT, ()))[-2:]
    usual_s = FACTOR * (longest[0] if longest else 0.0)
    return min(policy.hang_s, max(policy.settle_s, usual_s))


def _place(wait: WaitRecord) -> tuple[int, int, int, int]:
    return wait.slot, wait.incarnation, wait.generation, wait.collective


def judge(
    state: LivenessState,
    policy: LivenessPolicy,
    members: Sequence[WorkerKey],
    plan: Plan,
) -> Verdict:
    """Who hangs among ``members``: the workers of this node that others count on. ``plan`` is the
    newest one. That all members of a job wait is said only where other nodes say it of theirs."""
    tracks = {key: state.tracks[key] for key in members if key in state.tracks}
    hung = _outside(state, policy, tracks, plan) or _left_behind(state, policy, tracks, plan)
    if hung:
        return hung
    everybody = {**tracks, **state.elsewhere}
    complete = len(plan.members) > 1 and all(m.key in everybody for m in plan.members)
    limit_s = bound_s(state, policy, COLLECTIVE)
    least_s = min([state.all_inside_s, *(e.waited_s for e in state.elsewhere.values())])
    if complete and tracks and len(tracks) == len(state.tracks) and least_s > limit_s:
        where = ", ".join(f"{key} {_where(track)}" for key, track in tracks.items())
        there = "".join(f", {key} inside {e.position}" for key, e in state.elsewhere.items())
        text = f"all wait for {least_s:.1f} s, bound {limit_s:.1f} s: {where}{there}"
        return Stuck(plan.generation, text)
    return ()


def _outside(
    state: LivenessState,
    policy: LivenessPolicy,
    tracks: Mapping[WorkerKey, Track],
    plan: Plan,
) -> tuple[Hung, ...]:
    """Those that others wait for: silent, not waiting themselves, and behind everybody."""
    outside = {key: track for key, track in tracks.items() if not track.inside}
    last = min((track.position for track in outside.values()), default=None)
    hung = []
    for key, track in outside.items():
        limit_s = bound_s(state, policy, track.phase)
        waiting = [k for k, other in tracks.items() if _waits_for(other, track, policy)]
        waiting += _waiting_elsewhere(state, tracks, key, plan)
        if waiting and track.position == last and track.quiet_s > limit_s:
            hung.append(_hung(key, track, limit_s, waiting))
    return tuple(hung)


def _waits_for(waiter: Track, other: Track, policy: LivenessPolicy) -> bool:
    """Who is ahead has left the collective that the other one has not entered: on a GPU it may wait
    outside, for work of its own that is in the stream behind that."""
    if waiter.inside:
        return waiter.inside_s >= policy.settle_s and waiter.position >= other.position
    ahead = waiter.position > other.position and waiter.position[0] == other.position[0]
    return ahead and waiter.quiet_s >= policy.settle_s


def _waiting_elsewhere(
    state: LivenessState, tracks: Mapping[WorkerKey, Track], key: WorkerKey, plan: Plan
) -> list[WorkerKey]:
    """Who waits on other nodes, in a collective that this worker has not entered; or in the one that it
    has entered last, when all the rest of the plan does: between its two words on the page, that it
    enters and that it is inside, a process can be stopped as well."""
    here = tracks[key].position
    later = [k for k, other in state.elsewhere.items() if other.position > here]
    inside = {k: t.position for k, t in tracks.items() if t.inside}
    inside |= {k: other.position for k, other in state.elsewhere.items()}
    rest = [m.key for m in plan.members if m.key != key]
    alone = all(k in inside and inside[k] >= here for k in rest)
    return later or ([k for k in rest if k in state.elsewhere] if alone else [])


def _left_behind(
    state: LivenessState,
    policy: LivenessPolicy,
    tracks: Mapping[WorkerKey, Track],
    plan: Plan,
) -> tuple[Hung, ...]:
    """Those still inside a wait that a forced plan has ended, while others wait in that plan."""
    if plan.kind != "forced":
        return ()
    waiting = [
        key
        for key, track in tracks.items()
        if track.inside
        and track.inside_s >= policy.settle_s
        and track.position[0] == plan.generation
    ]
    waiting += [k for k, other in state.elsewhere.items() if other.position[0] == plan.generation]
    return tuple(
        _hung(key, track, policy.hang_s, waiting)
        for key, track in tracks.items()
        if waiting
        and track.inside
        and track.position[0] < plan.generation
        and track.quiet_s > policy.hang_s
    )


def _hung(key: WorkerKey, track: Track, limit_s: float, waiting: Sequence[WorkerKey]) -> Hung:
    names = ", ".join(map(str, waiting))
    text = f"hang: silent for {track.quiet_s:.1f} s {_where(track)}, bound {limit_s:.1f} s; {names} wait"
    return Hung(key, text)


def _where(track: Track) -> str:
    generation, collective = track.position
    side = "inside" if track.inside else "after"
    return f"in {track.phase} ({side} collective {collective} of generation {generation})"
