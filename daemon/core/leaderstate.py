"""The state of the leader's decisions."""

import math
from dataclasses import dataclass

from rallypoint.daemon.core.errors import Recent
from rallypoint.daemon.core.events import ProbeAnswered
from rallypoint.daemon.core.policy import LeaderPolicy
from rallypoint.daemon.core.records import JobRecord, JobState, MemberRecord, WaitRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0


@dataclass(frozen=True)
class Probe:
    """A probe in flight."""

    number: int
    targets: tuple[WorkerKey, ...]


@dataclass(frozen=True)
class Answers:
    """The answer to a probe; used in the same decision and then forgotten."""

    asked: frozenset[WorkerKey]
    answering: frozenset[WorkerKey]
    gone: frozenset[WorkerKey]

    @staticmethod
    def of(probe: Probe, event: ProbeAnswered) -> "Answers":
        """Whoever was asked and did not answer kept silent."""
        return Answers(frozenset(probe.targets), frozenset(event.answering), frozenset(event.gone))


@dataclass(frozen=True)
class Standstill:
    """A member waits for others, and has since then, as far as its record tells."""

    node: str
    wait: WaitRecord
    since_s: float


@dataclass(frozen=True)
class LeaderState:
    """What the store holds as of the newest events, and what the leader has under way."""

    policy: LeaderPolicy
    members: tuple[MemberRecord, ...] = ()
    plan: Plan | None = None
    job: JobRecord | None = None
    """None: this node does not lead."""
    newest_generation: int = 0
    """Newest number known from elsewhere, or used by us."""
    deposed: bool = False
    """It was elected once and is not any more."""
    elected_at_s: float = 0.0
    witness_generation: int = 0
    """The generation whose collectives were seen to end here last."""
    witness_at_s: float = -math.inf
    standstills: tuple[Standstill, ...] = ()
    """Who waits for others, as the present records say it."""
    store_back_s: float = 0.0
    """When the store was there again after it had been away; 0: it never was."""
    given_up: frozenset[WorkerKey] = frozenset()
    """Absent members of the present plan that are taken for lost."""
    given_up_at_s: float = 0.0
    """When they were last asked."""
    inquire_after_s: float = 0.0
    """Absent members are not asked again before this moment."""
    recording: tuple[int, int] | None = None
    """The checkpoint that was ordered to be written into the job's record last."""
    record_again_s: float = 0.0
    """When that order is repeated, if it is not there yet."""
    loss_at_s: float | None = None
    """When the first loss of this window was seen."""
    gather_at_s: float | None = None
    """When the first newcomer that waits was seen."""
    whole_at_s: float = -math.inf
    """When they may have trained last, who are listed no more but answer: all that they need answered, or
    it was the first answer since the loss."""
    not_before_s: float = 0.0
    """Back-off of retries: no forced plan and no probe before this moment."""
    refused_until_s: float = 0.0
    """Back-off after the store refused: nothing is written before this moment."""
    retries: int = 0
    """Plans in a row that followed one that never formed, and refusals."""
    last_probe: int = 0
    probe: Probe | None = None
    publishing: int = 0
    """Generation of the plan that is being written; 0: none."""
    marking: int = 0
    """Generation whose formed mark is being written; 0: none."""
    ordered_state: JobState | None = None
    """Job state that was ordered and is not in the record yet."""
    timer_at_s: float | None = None
    refused_devices: str = ""
    """Newcomers refused for their devices, as it was explained last."""
    said: str = ""
    """The newest explanation of waiting, so that it is given once."""
    recent: Recent = ()

    @property
    def back_off_s(self) -> float:
        """0.05 s, doubled with each retry, at most 1 s."""
        return float(min(RETRY_FIRST_S * 2.0 ** min(self.retries, 10), RETRY_MOST_S))
