"""A worker's own account of its time, on its slot's page."""

import threading
import time
from pathlib import Path

import pytest

from rallypoint.daemon.shared.activity import BUCKETS
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.trainer.elastic.ledger import Ledger


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(1e9 * self.now_s))

    def after(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(name="clock")
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(name="page")
def fresh_page(tmp_path: Path) -> SlotPage:
    return SlotPage(tmp_path / "0.page", create=True)


def shown(page: SlotPage, clock: Clock) -> dict[str, float]:
    """Seconds by bucket as a reader sees them now, without zeros."""
    seconds = page.read_ledger().seconds(clock.now_s)
    return {b: round(s, 6) for b, s in zip(BUCKETS, seconds, strict=True) if s > 1e-9}


def test_time_is_in_one_bucket_and_a_reader_sees_the_present_one_grow(
    clock: Clock, page: SlotPage
) -> None:
    assert page.read_ledger().seconds(clock.now_s) == [0.0] * len(BUCKETS)
    ledger = Ledger(page)
    clock.after(2.0)
    assert shown(page, clock) == {"warm_up": 2.0}
    ledger.switch("rollout")
    clock.after(3.0)
    assert shown(page, clock) == {"warm_up": 2.0, "rollout": 3.0}
    ledger.switch("update")
    clock.after(0.5)
    assert ledger.so_far_s("rollout") == 3.0
    assert ledger.take() == ({"warm_up": 2.0, "rollout": 3.0, "update": 0.5}, 0.0)
    assert ledger.take() == ({}, 0.0)
    assert shown(page, clock) == {"warm_up": 2.0, "rollout": 3.0, "update": 0.5}
    with pytest.raises(KeyError, match="tea"):
        ledger.switch("tea")


def test_a_wait_in_vain_is_detection_from_where_it_began(clock: Clock, page: SlotPage) -> None:
    ledger = Ledger(page)
    ledger.switch("update")
    clock.after(1.0)
    waited_since_ns = int(1e9 * clock.now_s)
    clock.after(5.0)
    assert shown(page, clock) == {"update": 6.0}
    ledger.recover("detect", since_ns=waited_since_ns)
    clock.after(1.0)
    assert shown(page, clock) == {"update": 1.0, "recovery/detect": 6.0}
    ledger.recover("detect", since_ns=0)
    assert shown(page, clock) == {"update": 1.0, "recovery/detect": 6.0}, (
        "not before the last switch"
    )


def test_a_recovery_has_phases_also_from_the_thread_that_forms(
    clock: Clock, page: SlotPage
) -> None:
    ledger = Ledger(page)
    ledger.recover("detect")
    clock.after(1.0)

    def form() -> None:
        for phase, seconds in (("arrive", 2.0), ("group_init", 1.0), ("who_is_where", 4.0)):
            ledger.phase(phase)
            clock.after(seconds)

    thread = threading.Thread(target=form)
    thread.start()
    thread.join()
    ledger.switch("rollout")
    ledger.phase("broadcast")  # beside a rollout, which goes on: its time is the rollout's
    clock.after(8.0)
    expected = {"recovery/detect": 1.0, "recovery/group": 3.0, "recovery/sync": 4.0, "rollout": 8.0}
    assert shown(page, clock) == expected
    assert ledger.take()[0] == {"recovery": 8.0, "rollout": 8.0}


def test_what_is_thrown_away_is_told_with_the_next_commit(clock: Clock, page: SlotPage) -> None:
    ledger = Ledger(page)
    ledger.switch("update")
    clock.after(1.0)
    ledger.take()
    clock.after(2.0)
    ledger.redo("update", "statistics")
    clock.after(4.0)
    ledger.redo("rollout")
    seconds, redone_s = ledger.take()
    assert (seconds, redone_s) == ({"update": 6.0}, 2.0)
    assert ledger.take() == ({}, 0.0)


def test_a_page_of_an_older_worker_is_shorter_and_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "0.page"
    path.write_bytes(bytes(80))
    page = SlotPage(path)
    assert page.read_ledger().seconds(5.0) == [0.0] * len(BUCKETS)
    assert page.read().phase == "starting"
