"""Telling a worker that hangs from one that is waited for (DESIGN 4.9), from readings of slot pages.

A worker's *position* is (generation, collectives entered in it). *Inside* means that it waits for the
other members. Who is silent past the bound of its phase, not inside, and not ahead of somebody who
waits is hung; so is who does not follow a forced plan, which ends every wait of an older generation.
When all are inside and nothing moves, nobody is to blame: the generation is to be formed anew.

Silence is counted in steps of this node's own clock, none longer than two intervals: were all of us
frozen together, nobody has been silent. Bounds are learned: three times what was measured in the same
phase of this run, and at least ``hang_s``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotCounters

FACTOR: Final = 3.0
"""The bound of a phase over the longest silence that was measured in it."""
SAMPLES: Final = 64
"""Silences remembered for each phase."""
COLLECTIVE: Final = "collective"
"""Name under which waits are learned in which all members were inside."""


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
class LivenessState:
    """What all readings so far have shown."""

    at_s: float | None = None
    tracks: Mapping[WorkerKey, Track] = field(default_factory=lambda: MappingProxyType({}))
    all_inside_s: float = 0.0
    """For this long every worker has been inside and nothing moved."""
    silences: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Newest silences that ended by themselves, by phase."""


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
) -> LivenessState:
    """The state after a reading, at monotonic time ``now``, of the pages of all workers that somebody
    counts on. Others are forgotten."""
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
    still = bool(tracks) and all(
        track.inside and _same(state.tracks.get(key), track.counters)
        for key, track in tracks.items()
    )
    if not still and state.all_inside_s:
        _learn(silences, COLLECTIVE, state.all_inside_s)
    return LivenessState(
        at_s=now,
        tracks=MappingProxyType(tracks),
        all_inside_s=state.all_inside_s + step_s if still else 0.0,
        silences=MappingProxyType(silences),
    )


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


def judge(
    state: LivenessState,
    policy: LivenessPolicy,
    members: Sequence[WorkerKey],
    plan: Plan,
) -> Verdict:
    """Who hangs among ``members``: the workers of this node that others count on. ``plan`` is the
    newest one. Nothing is said of all members of a job while some are on other nodes."""
    tracks = {key: state.tracks[key] for key in members if key in state.tracks}
    hung = _outside(state, policy, tracks) or _left_behind(policy, tracks, plan)
    if hung:
        return hung
    complete = len(tracks) > 1 and all(member.key in tracks for member in plan.members)
    limit_s = bound_s(state, policy, COLLECTIVE)
    if complete and len(tracks) == len(state.tracks) and state.all_inside_s > limit_s:
        where = ", ".join(f"{key} {_where(track)}" for key, track in tracks.items())
        text = f"all wait for {state.all_inside_s:.1f} s, bound {limit_s:.1f} s: {where}"
        return Stuck(plan.generation, text)
    return ()


def _outside(
    state: LivenessState, policy: LivenessPolicy, tracks: Mapping[WorkerKey, Track]
) -> tuple[Hung, ...]:
    """Those that others wait for: silent, not waiting themselves, and behind everybody."""
    outside = {key: track for key, track in tracks.items() if not track.inside}
    last = min((track.position for track in outside.values()), default=None)
    hung = []
    for key, track in outside.items():
        limit_s = bound_s(state, policy, track.phase)
        waiting = [k for k, other in tracks.items() if _waits_for(other, track, policy)]
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


def _left_behind(
    policy: LivenessPolicy, tracks: Mapping[WorkerKey, Track], plan: Plan
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
