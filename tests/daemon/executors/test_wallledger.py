"""Every second of every slot is in exactly one activity, whatever happens to its workers."""

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from rallypoint.daemon.executors.wallledger import WallLedger
from rallypoint.daemon.shared.activity import BUCKETS
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.slotpage import LedgerReading
from tests.fakes.facts import A, B, committed

A2 = WorkerKey("local", 0, 2)


def page(began_s: float, now_in: str, **seconds: float) -> LedgerReading:
    """A worker that is in this bucket now; underscores of a recovery's phases are slashes."""
    by_bucket = {name.replace("recovery_", "recovery/"): value for name, value in seconds.items()}
    assert by_bucket.keys() <= set(BUCKETS)
    ns = tuple(int(1e9 * by_bucket.get(bucket, 0.0)) for bucket in BUCKETS)
    return LedgerReading(int(1e9 * began_s), BUCKETS.index(now_in), ns)


NOTHING = page(0.0, "warm_up")
"""Of a worker that has not begun to account for its time."""


class Totals:
    """All that a ledger has handed over."""

    def __init__(self, ledger: WallLedger) -> None:
        self.ledger = ledger
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.badput: defaultdict[str, float] = defaultdict(float)

    def tick(self, now: float, pages: Mapping[WorkerKey, LedgerReading]) -> None:
        self.ledger.tick(now, pages)
        self.take()

    def take(self) -> None:
        wall, badput = self.ledger.take()
        assert min([0.0, *wall.values(), *badput.values()]) >= 0.0, "what is counted never falls"
        for (activity, phase), seconds in wall.items():
            if seconds < 1e-6:
                continue  # the nanosecond with which the pages here begin
            self.wall[f"{activity}/{phase}" if phase else activity] += seconds
        for cause, seconds in badput.items():
            if seconds >= 1e-6:
                self.badput[cause] += seconds

    def sum(self) -> float:
        return sum(self.wall.values())


def near(expected: Mapping[str, float]) -> Any:
    return pytest.approx(dict(expected), abs=1e-6)


def test_one_slot_from_its_start_over_a_death_to_the_next_life() -> None:
    totals = Totals(WallLedger(1, 100.0))
    totals.tick(101.0, {})
    totals.tick(102.0, {A: NOTHING})
    assert totals.wall == near({"warm_up": 2.0}), "its process has begun, its ledger has not"
    totals.tick(106.0, {A: page(103.0, "rollout", warm_up=1.0)})
    assert totals.wall == near({"warm_up": 4.0, "rollout": 2.0})
    totals.ledger.committed(committed(A, 1, {A: 1}, activity={"warm_up": 1.0, "rollout": 1.5}))
    last = page(103.0, "update", warm_up=1.0, rollout=3.0)
    totals.ledger.ended(A, 108.0, last, by_agreement=False)
    totals.take()
    assert totals.wall == near({"warm_up": 4.0, "rollout": 3.0, "update": 1.0})
    assert totals.badput == near({"warm_up": 4.0, "redone": 2.5}), "what it had not committed"
    totals.tick(109.0, {})
    totals.tick(110.0, {A2: NOTHING})
    assert totals.wall["recovery/restart"] == pytest.approx(2.0), "a slot that lost its worker"
    assert totals.badput["restart"] == pytest.approx(2.0)
    totals.tick(111.0, {A2: page(110.5, "idle")})
    assert totals.sum() == pytest.approx(11.0)


def test_a_recovery_has_the_cause_of_the_generation_that_ends_it() -> None:
    totals = Totals(WallLedger(1, 0.0))
    totals.tick(0.0, {A: NOTHING})
    totals.ledger.changing()
    totals.tick(3.0, {A: page(1e-9, "recovery/detect", rollout=1.0)})
    assert totals.badput == {}
    totals.ledger.formed("node_lost")
    totals.tick(4.0, {A: page(1e-9, "recovery/envs", rollout=1.0, recovery_detect=2.0)})
    assert totals.badput == near({"node_lost": 3.0}), "what is left of it too"
    assert totals.wall == near({"rollout": 1.0, "recovery/detect": 2.0, "recovery/envs": 1.0})


def test_seconds_that_a_worker_takes_back_leave_the_sum_right_and_nothing_falls() -> None:
    """It waited in an update for a peer that was gone: from then on that was a recovery."""
    totals = Totals(WallLedger(1, 0.0))
    totals.tick(0.0, {A: NOTHING})
    totals.tick(10.0, {A: page(1e-9, "update")})
    assert totals.wall == near({"update": 10.0})
    totals.tick(11.0, {A: page(1e-9, "recovery/detect", update=4.0)})
    assert totals.sum() == pytest.approx(11.0)
    totals.tick(30.0, {A: page(1e-9, "rollout", update=4.0, recovery_detect=7.0)})
    assert totals.sum() == pytest.approx(30.0)
    assert totals.wall["update"] == pytest.approx(10.0)
    totals.tick(90.0, {A: page(1e-9, "idle", update=14.0, recovery_detect=7.0, rollout=60.0)})
    assert totals.wall == near(
        {"update": 14.0, "recovery/detect": 7.0, "rollout": 60.0, "idle": 9.0}
    )


def test_what_was_thrown_away_is_badput_of_productive_seconds() -> None:
    totals = Totals(WallLedger(1, 0.0))
    totals.tick(0.0, {A: NOTHING})
    totals.tick(5.0, {A: page(1e-9, "rollout")})
    activity = {"rollout": 3.0, "update": 2.0}
    totals.ledger.committed(committed(A, 1, {A: 1}, activity=activity, redone_s=1.5))
    totals.take()
    assert totals.badput == near({"redone": 1.5})


def test_a_drained_slot_and_one_in_quarantine() -> None:
    totals = Totals(WallLedger(2, 0.0))
    totals.tick(0.0, {A: NOTHING, B: NOTHING})
    totals.ledger.ended(A, 1.0, page(1e-9, "drain"), by_agreement=True)
    totals.ledger.ended(B, 1.0, page(1e-9, "warm_up"), by_agreement=False)
    totals.ledger.quarantined([False, True])
    totals.tick(3.0, {})
    totals.ledger.quarantined([False, False])
    totals.tick(4.0, {})
    expected = {"drain": 4.0, "warm_up": 1.0, "idle/quarantine": 2.0, "recovery/restart": 1.0}
    assert totals.wall == near(expected)
    causes = {"drain": 4.0, "warm_up": 1.0, "quarantine": 2.0, "restart": 1.0}
    assert totals.badput == near(causes)


def test_the_next_supervisor_goes_on_without_a_gap() -> None:
    first = Totals(WallLedger(2, 0.0))
    first.tick(4.0, {A: page(1.0, "rollout")})
    second = Totals(WallLedger(2, 9.0))
    second.ledger.resume(first.ledger.books())
    second.tick(9.0, {})
    second.tick(10.0, {A: page(1.0, "update", rollout=7.0)})
    assert first.sum() + second.sum() == pytest.approx(20.0)
    assert first.wall["update"] + second.wall["update"] == pytest.approx(2.0)
    second.tick(12.0, {A2: NOTHING})
    assert second.wall["recovery/restart"] == pytest.approx(2.0), "its worker went unseen"
    assert first.sum() + second.sum() == pytest.approx(24.0)
    other = WallLedger(3, 9.0)
    other.resume(first.ledger.books())
    assert len(other.books().slots) == 3, "of a node with other slots: not taken"


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_is_slots_times_time_whatever_happens(seed: int) -> None:
    """Random lives, switches that reach back, deaths and readings; badput is what is not productive."""
    rng, now = random.Random(seed), 0.0  # noqa: S311 - a reproducible history
    totals = Totals(WallLedger(3, now))
    lives: dict[int, tuple[WorkerKey, list[int], int, int]] = {}
    for step in range(300):
        now += rng.choice((0.0, 0.001, 0.5, 3.0))
        slot = rng.randrange(3)
        if slot not in lives:
            lives[slot] = WorkerKey("local", slot, step + 1), [0] * len(BUCKETS), 0, 0
        else:
            key, ns, bucket, began = lives[slot]
            pages = {k: LedgerReading(b, i, tuple(n)) for k, n, i, b in lives.values()}
            if rng.random() < 0.1:
                totals.ledger.ended(key, now, pages[key], by_agreement=rng.random() < 0.5)
                del lives[slot]
            elif not began:
                lives[slot] = key, ns, bucket, max(1, int(1e9 * now))
            else:
                open_ns = max(0, int(1e9 * now) - began - sum(ns))
                ns[bucket] += int(open_ns * rng.choice((1.0, 1.0, 0.5)))
                lives[slot] = key, ns, rng.randrange(len(BUCKETS)), began
        if rng.random() < 0.5:
            pages = {k: LedgerReading(b, i, tuple(n)) for k, n, i, b in lives.values()}
            totals.tick(now, pages)
    totals.tick(now, {k: LedgerReading(b, i, tuple(n)) for k, n, i, b in lives.values()})
    assert totals.sum() == pytest.approx(3 * now, abs=1e-3)
    totals.ledger.formed("worker_lost")
    totals.take()
    productive = sum(totals.wall[name] for name in ("rollout", "update", "statistics"))
    explained = sum(totals.badput.values()) - totals.badput["redone"]
    assert explained + productive == pytest.approx(totals.sum(), abs=1e-3)
