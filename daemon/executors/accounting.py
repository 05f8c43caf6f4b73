"""Ledgers: env steps that were used or lost, where the time of a membership change went.

All are plain bookkeeping over past facts; times are monotonic seconds and passed in.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from rallypoint.daemon.executors.labels import PHASES
from rallypoint.daemon.shared.messages import Committed, EnvsHeld, Formed, RankRecord, Stepped
from rallypoint.daemon.shared.plan import ChangeCause, Plan, WorkerKey

_WORKER_PHASES: Final = ("release", "group", "sync")


class StepLedger:
    """Collected env steps are used (in a committed iteration) or lost, never both.

    What a dead worker collected is settled only once a generation without it has formed: until then
    the survivors may still commit the iteration that holds its rollout.
    """

    def __init__(self) -> None:
        self._accounted: dict[WorkerKey, int] = {}
        self._dead: dict[WorkerKey, tuple[int, str]] = {}

    def used(self, ranks: Iterable[RankRecord]) -> int:
        """Note the steps of a committed iteration; returns their sum."""
        total = 0
        for rank in ranks:
            self._account(rank.key, rank.env_steps)
            total += rank.env_steps
        return total

    def reported_lost(self, key: WorkerKey, env_steps: int) -> None:
        """Note steps that a worker itself reported as lost."""
        self._account(key, env_steps)

    def died(self, key: WorkerKey, collected: int, *, by_agreement: bool) -> None:
        """Note the end of a worker that had collected this many steps in its life."""
        self._dead[key] = (collected, "dropped" if by_agreement else "died")

    def settle(self, members: Iterable[WorkerKey] = ()) -> dict[str, int]:
        """Lost steps by reason of all dead workers that are not among ``members``."""
        lost: dict[str, int] = {}
        for key in [key for key in self._dead if key not in set(members)]:
            collected, reason = self._dead.pop(key)
            steps = max(0, collected - self._accounted.pop(key, 0))
            lost[reason] = lost.get(reason, 0) + steps
        return lost

    def accounted(self) -> tuple[tuple[WorkerKey, int], ...]:
        """Steps of each worker that are known to be used or lost."""
        return tuple(self._accounted.items())

    def unsettled(self) -> tuple[tuple[WorkerKey, int, str], ...]:
        """Dead workers that are not settled yet: what they collected, and how it is lost."""
        return tuple((key, *rest) for key, rest in self._dead.items())

    def resume(
        self,
        accounted: Iterable[tuple[WorkerKey, int]],
        unsettled: Iterable[tuple[WorkerKey, int, str]],
    ) -> None:
        """Go on from the ledger of the supervisor before."""
        self._accounted = dict(accounted)
        self._dead = {key: (collected, reason) for key, collected, reason in unsettled}

    def _account(self, key: WorkerKey, env_steps: int) -> None:
        self._accounted[key] = self._accounted.get(key, 0) + env_steps


@dataclass
class Change:
    """One membership change under way, as the workers of one node see it."""

    plan: Plan
    node: str
    noticed_s: float
    decided_s: float
    published_s: float
    formed: dict[WorkerKey, Formed] = field(default_factory=dict)
    stepped: dict[WorkerKey, Stepped] = field(default_factory=dict)
    envs_held_s: dict[WorkerKey, float] = field(default_factory=dict)
    """Of workers that held their planned envs only after their first step."""
    marked: bool = False

    @property
    def complete(self) -> bool:
        """Every member of this node has made its first optimiser step."""
        mine = [m.key for m in self.plan.members if m.key.node == self.node]
        return self.marked and bool(mine) and all(key in self.stepped for key in mine)

    @property
    def envs_s(self) -> float | None:
        """The longest that a member of this node took to hold its planned envs; None until all do."""
        owed = {key for key, message in self.stepped.items() if message.envs_owed}
        if not self.complete or owed - self.envs_held_s.keys():
            return None
        return max(self.envs_held_s.get(key, step.envs_s) for key, step in self.stepped.items())

    def seconds(self) -> dict[str, float | None]:
        """Seconds of each phase; None where it is not known (yet)."""
        seconds: dict[str, float | None] = dict.fromkeys(PHASES)
        seconds["detect"] = max(0.0, self.decided_s - self.noticed_s)
        seconds["plan"] = max(0.0, self.published_s - self.noticed_s)
        if self.marked:
            for phase in _WORKER_PHASES:
                reported = [m.seconds[phase] for m in self.formed.values() if phase in m.seconds]
                seconds[phase] = max(reported, default=None)
        if self.complete:
            stepped_s = [message.at_s for message in self.stepped.values()]
            # An adopted worker of an older version does not say when it formed.
            formed_s = max((m.at_s for m in self.formed.values()), default=min(stepped_s))
            seconds["envs"] = max(message.envs_s for message in self.stepped.values())
            seconds["first_step"] = max(0.0, min(stepped_s) - formed_s)
            seconds["total"] = max(0.0, max(stepped_s) - self.noticed_s)
        return seconds


class RecoveryClock:
    """Times of the newest change. A change that is superseded before it formed hands the moment at
    which it was noticed on to its successor: the clock of an outage is never set back."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.last: Change | None = None
        """Newest generation that formed."""
        self._open: Change | None = None
        self._noticed_s: float | None = None
        self._decided_s: float | None = None

    @property
    def newest_plan(self) -> Plan | None:
        """The plan that was published last."""
        return None if self._open is None else self._open.plan

    def moments(self) -> tuple[int, float, float, float] | None:
        """The newest change: generation, and when it was noticed, decided, published."""
        change = self._open
        if change is None:
            return None
        return change.plan.generation, change.noticed_s, change.decided_s, change.published_s

    def resume(
        self,
        formed: Plan,
        newest: Plan,
        moments: tuple[int, float, float, float] | None,
        now: float,
    ) -> None:
        """Go on from the clock of the supervisor before, where its moments are known."""
        known = moments is not None and moments[0] == newest.generation
        at_s = moments[1:] if moments is not None and known else (now, now, now)
        self._open = Change(newest, self._node, *at_s)
        self.last = self._open
        if formed.generation != newest.generation:
            self.last = Change(formed, self._node, now, now, now)
        self.last.marked = True

    def noticed(self, at_s: float, decided_s: float) -> None:
        """A loss was noticed at ``at_s`` and taken up by the decisions at ``decided_s``."""
        if self._noticed_s is None:
            self._noticed_s, self._decided_s = at_s, decided_s

    def published(self, plan: Plan, now: float) -> None:
        """A plan was published."""
        noticed_s, decided_s = now, now
        if plan.kind == "forced" and self._noticed_s is not None:
            noticed_s, decided_s = self._noticed_s, self._decided_s or now
        self._noticed_s = self._decided_s = None
        earlier = self._open
        if (
            earlier is not None
            and earlier.plan.kind == "forced"
            and not earlier.marked
            and earlier.noticed_s < noticed_s
        ):
            noticed_s, decided_s = earlier.noticed_s, earlier.decided_s
        self._open = Change(plan, self._node, noticed_s, decided_s, now)

    def open_for_s(self, now: float) -> float:
        """How long a loss has been known that this node has not recovered from; 0 while there is none."""
        change = self._open
        if self._noticed_s is not None:
            return now - self._noticed_s
        if change is None or change.plan.kind != "forced" or change.complete:
            return 0.0
        trains = change.plan.lists(self._node) and not change.plan.hold
        return now - change.noticed_s if trains or not change.marked else 0.0

    def formed(self, message: Formed) -> None:
        """A member reports a generation formed."""
        for change in (self._open, self.last):
            if change is not None and change.plan.generation == message.generation:
                change.formed[message.key] = message
                return

    def marked(self, generation: int) -> Change | None:
        """The leader marked a generation formed: the change, the first time."""
        change = self._open
        if change is None or change.plan.generation != generation or change.marked:
            return None
        change.marked = True
        self.last = change
        return change

    def stepped(self, message: Stepped) -> Change | None:
        """A member made its first optimiser step: the change, once all have."""
        for change in (self._open, self.last):
            if change is not None and change.plan.generation == message.generation:
                was_complete = change.complete
                change.stepped.setdefault(message.key, message)
                return change if change.complete and not was_complete else None
        return None

    def envs_held(self, message: EnvsHeld) -> Change | None:
        """A member holds its planned envs after its first step: the change, once all do."""
        for change in (self._open, self.last):
            if change is not None and change.plan.generation == message.generation:
                known = change.envs_s is not None
                change.envs_held_s.setdefault(message.key, message.envs_s)
                return change if change.envs_s is not None and not known else None
        return None


def rounded(seconds: dict[str, float | None]) -> dict[str, float | None]:
    """Seconds of each phase as log lines show them."""
    return {k: None if v is None else round(v, 4) for k, v in seconds.items()}


class Rate:
    """Env steps a second of the present generation: what entered its committed iterations, over its
    wall time. The time between two generations is none of either, and is reported as recovery."""

    def __init__(self) -> None:
        self._generation = 0
        self._env_steps, self._wall_s = 0, 0.0

    def take(self, message: Committed) -> float:
        """The rate of the generation that committed this iteration, up to it; 0 while not known."""
        if message.generation != self._generation:
            self._generation, self._env_steps, self._wall_s = message.generation, 0, 0.0
        self._env_steps += sum(rank.env_steps for rank in message.ranks)
        self._wall_s += message.wall_s
        return self._env_steps / self._wall_s if self._wall_s > 0 else 0.0


@dataclass(frozen=True)
class Stall:
    """What one worker lost to one change."""

    cause: ChangeCause
    seconds: float


class Stalls:
    """For how long a survivor did nothing for the training because the membership changed: what it calls
    recovery in the first iteration that it commits in a generation. In a planned change everybody trains
    on until the safe point, so this, and not the time since the plan, is what the change costs."""

    def __init__(self) -> None:
        self._generations: dict[WorkerKey, int] = {}

    def take(self, message: Committed, plan: Plan | None) -> Stall | None:
        """The stall of the change that began ``plan``; None where the message is not the first one of a
        survivor in it."""
        before = self._generations.get(message.key, 0)
        self._generations[message.key] = message.generation
        if plan is None or plan.generation != message.generation or before == message.generation:
            return None
        if message.key not in plan.survivors:
            return None
        return Stall(plan.cause, message.activity.get("recovery", 0.0))


class NewestChanges:
    """What the newest completed change of each kind took."""

    def __init__(self) -> None:
        self._changes: dict[str, tuple[float, float]] = {}

    def take(self, change: Change) -> None:
        """A change is completed."""
        total_s = change.seconds()["total"]
        if total_s is not None:
            self._changes[change.plan.kind] = total_s, change.noticed_s

    def total_s(self, kind: str) -> float:
        """From notice to the first optimiser step; NaN while there was none of this kind."""
        return self._changes.get(kind, (math.nan, 0.0))[0]

    def age_s(self, kind: str, now: float) -> float:
        """Since it was noticed; NaN likewise."""
        return now - self._changes.get(kind, (0.0, math.nan))[1]
