"""Members of a generation that trains whose node has no lease: do they take part, or are they lost?

A supervisor that is silent proves no loss: its workers may train on. They are asked at their own ports
and stay while they answer. But a port answers as long as its kernel lives: a node that was frozen whole
answers for ever. So who is silent in both planes is lost as well: without a lease, while some member
with one has waited for others, in one and the same collective, for as long as a lease lasts.
"""

import math
from typing import Final

from rallypoint.daemon.core.frozen import replace
from rallypoint.daemon.core.leaderstate import Answers, LeaderState, Standstill
from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import WorkerKey

ASK_AGAIN_S: Final = 1.0


def note(state: LeaderState, now: float) -> LeaderState:
    """Remember since when members wait, as their records say it."""
    known = {(s.node, s.wait): s for s in state.standstills}
    standstills = tuple(
        known.get((member.node, wait)) or Standstill(member.node, wait, now - wait.waited_s)
        for member in state.members
        for wait in member.waits
    )
    return replace(state, standstills=standstills)


def lost(state: LeaderState, job: JobRecord, answers: Answers, now: float) -> frozenset[WorkerKey]:
    """Which of those that were asked are lost. A collective with everybody that has just ended shows
    that all of them live, but for those known to be gone."""
    witnessed = now - state.witness_at_s <= state.policy.witness_s
    if witnessed and state.witness_generation == job.formed:
        return answers.asked & answers.gone
    stands_still = now >= _due_s(state, job)
    return answers.asked if stands_still else answers.asked - answers.answering


def ask_again_s(state: LeaderState, job: JobRecord, now: float) -> float:
    """When they are to be asked next: each second, and when a standstill has lasted too long."""
    later_s = now + ASK_AGAIN_S
    return min(later_s, _due_s(state, job)) if now < _due_s(state, job) else later_s


def _due_s(state: LeaderState, job: JobRecord) -> float:
    """When the oldest standstill of the formed generation will have lasted for a lease."""
    since_s = (s.since_s for s in state.standstills if s.wait.generation == job.formed)
    return min(since_s, default=math.inf) + state.policy.detect_s
