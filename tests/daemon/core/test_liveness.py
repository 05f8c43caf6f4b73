"""Who hangs and who is waited for, from readings of slot pages (DESIGN 4.9)."""

from typing import Any

import pytest

from rallypoint.daemon.core import liveness
from rallypoint.daemon.core.liveness import COLLECTIVE, Hung, LivenessPolicy, Stuck, Verdict
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotCounters
from tests.fakes.membership import key, plan

POLICY = LivenessPolicy(hang_s=10.0, interval_s=1.0)
KEYS = (key(0), key(1), key(2))


class Pages:
    """Three workers that train in generation 3, read once a second."""

    def __init__(self, present: Plan | None = None) -> None:
        self.now = 100.0
        self.state = liveness.LivenessState()
        self.plan = present or plan(3, *KEYS)
        self.pages: dict[WorkerKey, dict[str, Any]] = {}
        for k in KEYS:
            self.put(k, "update", 7)

    def put(
        self,
        k: WorkerKey,
        phase: str,
        collective: int,
        *,
        inside: bool = False,
        generation: int = 3,
    ) -> "Pages":
        """The worker gets on: it is here now."""
        self.pages[k] = {
            "incarnation": k.incarnation,
            "generation": generation,
            "iteration": 5,
            "phase": phase,
            "collective": collective,
            "inside": inside,
            "touched_ns": int(self.now * 1e9),
        }
        return self

    def read(self, seconds: float = 1.0) -> Verdict:
        """Time passes in steps of one second, and the pages are read after each; the last verdict."""
        verdict: Verdict = ()
        for _ in range(round(seconds)):
            self.now += 1.0
            verdict = self.look()
        return verdict

    def look(self) -> Verdict:
        zero: dict[str, Any] = {"collected_env_steps": 0, "optimiser_steps": 0, "env_builds": 1}
        readings = {k: SlotCounters(**zero, **page) for k, page in self.pages.items()}
        self.state = liveness.observe(self.state, POLICY, readings, self.now)
        return liveness.judge(self.state, POLICY, tuple(self.pages), self.plan)

    def wait_inside(self, *keys: WorkerKey, collective: int = 8) -> "Pages":
        for k in keys:
            self.put(k, "update", collective, inside=True)
        return self


def hung(verdict: Verdict) -> list[WorkerKey]:
    assert not isinstance(verdict, Stuck)
    return [x.key for x in verdict]


def test_rule_09_who_is_silent_outside_the_collective_that_others_wait_in_is_hung() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(2))
    assert pages.read(10) == ()
    verdict = pages.read()
    assert hung(verdict) == [key(1)]
    assert isinstance(verdict, tuple)
    assert "silent for 11.0 s in update (after collective 7 of generation 3)" in verdict[0].reason
    assert "a/0#1, a/2#1 wait" in verdict[0].reason


def test_rule_09_two_that_hang_are_both_found() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0))
    assert hung(pages.read(11)) == [key(1), key(2)]


def test_rule_09_a_slow_env_is_waited_for_as_long_as_it_steps() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(2))
    for _ in range(20):
        pages.put(key(1), "rollout", 7)
        assert pages.read(5) == ()


def test_rule_09_the_bound_of_a_phase_is_three_times_what_was_measured_in_it() -> None:
    pages = Pages()
    for _ in range(3):
        pages.put(key(1), "rollout", 7)
        pages.read(8)
    assert liveness.bound_s(pages.state, POLICY, "rollout") == pytest.approx(21.0, abs=3.0)
    assert liveness.bound_s(pages.state, POLICY, "statistics") == POLICY.hang_s
    pages.put(key(1), "rollout", 7).wait_inside(key(0), key(2))
    assert pages.read(20) == ()
    assert hung(pages.read(6)) == [key(1)]


def test_rule_09_one_freeze_that_passed_does_not_raise_the_bound() -> None:
    pages = Pages()
    for _ in range(5):
        pages.put(key(1), "rollout", 7)
        pages.read()
    pages.read(9)
    pages.put(key(1), "rollout", 7)
    pages.read()
    assert liveness.bound_s(pages.state, POLICY, "rollout") == POLICY.hang_s


def test_rule_09_a_build_of_envs_may_take_three_times_that_of_the_warm_up() -> None:
    pages = Pages()
    for k in KEYS:
        pages.put(k, "warming", 0, generation=0)
    pages.read(30)
    for k in KEYS:
        pages.put(k, "ready", 0, generation=0)
    pages.read()
    assert liveness.bound_s(pages.state, POLICY, "envs") > 80.0


def test_rule_09_silence_that_nobody_waits_for_ends_nobody() -> None:
    pages = Pages()
    assert pages.read(100) == ()


def test_rule_09_when_all_are_inside_the_generation_is_stuck_and_nobody_is_ended() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(*KEYS)
    assert pages.read(10) == ()
    verdict = pages.read()
    assert isinstance(verdict, Stuck)
    assert verdict.generation == 3


def test_rule_09_inside_two_collectives_is_stuck_too() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(1)).wait_inside(key(2), collective=9)
    assert isinstance(pages.read(12), Stuck)


def test_rule_09_long_collectives_that_end_raise_the_bound_of_all_inside() -> None:
    pages = Pages()
    for collective in range(8, 12):
        pages.wait_inside(*KEYS, collective=collective)
        pages.read(9)
    assert liveness.bound_s(pages.state, POLICY, COLLECTIVE) > 20.0


def test_rule_09_who_waits_for_the_slowest_does_not_raise_that_bound() -> None:
    pages = Pages()
    for collective in range(8, 12):
        pages.wait_inside(key(0), key(1), collective=collective)
        for _ in range(9):
            pages.put(key(2), "rollout", collective - 1)
            pages.read()
    assert liveness.bound_s(pages.state, POLICY, COLLECTIVE) == POLICY.hang_s


def test_rule_09_a_node_that_was_cut_off_does_not_learn_from_the_outage() -> None:
    pages = Pages()
    for outage in (8, 9, 12):
        pages.wait_inside(*KEYS, collective=outage).read(60.0)
        pages.pages.clear()  # the others have formed without its workers: nobody counts on them now
        pages.read(5.0)
        for k in KEYS:
            pages.put(k, "update", outage)
        pages.read()
    assert liveness.bound_s(pages.state, POLICY, COLLECTIVE) == POLICY.hang_s


def test_rule_09_who_stays_in_a_wait_that_a_forced_plan_has_ended_is_hung() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(*KEYS)
    assert isinstance(pages.read(12), Stuck)
    pages.plan = plan(4, *KEYS)
    for k in (key(0), key(2)):
        pages.put(k, "arrive", 0, inside=True, generation=4)
    assert pages.read(2) == (), "it has some time to follow"
    assert hung(pages.read(2)) == [key(1)]


def test_rule_09_who_waits_for_the_safe_point_of_a_planned_change_is_not_behind() -> None:
    pages = Pages(plan(4, *KEYS, kind="planned"))
    pages.look()
    pages.put(key(2), "arrive", 0, inside=True, generation=4)
    for _ in range(10):
        pages.put(key(0), "rollout", 7).wait_inside(key(1))
        assert pages.read(5) == ()


def test_rule_09_the_one_who_holds_up_a_planned_change_is_found_and_not_its_peer() -> None:
    pages = Pages(plan(4, *KEYS, kind="planned"))
    pages.look()
    pages.put(key(2), "arrive", 0, inside=True, generation=4).wait_inside(key(1))
    assert hung(pages.read(12)) == [key(0)]


def test_rule_09_on_a_gpu_the_one_behind_is_found_though_nobody_is_inside() -> None:
    pages = Pages()
    pages.look()
    pages.put(key(0), "update", 9).put(key(2), "update", 9)
    assert hung(pages.read(12)) == [key(1)]


def test_rule_09_time_in_which_this_node_was_frozen_itself_is_no_silence() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(2))
    pages.read()
    pages.now += 3600.0
    assert pages.look() == ()
    pages.put(key(1), "update", 7)
    assert pages.read(9) == ()


def test_rule_09_the_page_of_an_earlier_life_says_nothing() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(2))
    pages.pages[key(1)]["incarnation"] = 0
    assert pages.read(30) == ()


def test_rule_09_with_members_on_other_nodes_nobody_here_says_that_all_wait() -> None:
    pages = Pages(plan(3, *KEYS, key(0, node_name="b")))
    pages.look()
    pages.wait_inside(*KEYS)
    assert pages.read(30) == ()
    pages.put(key(1), "update", 8)
    assert hung(pages.read(12)) == [key(1)], "who is outside is seen all the same"


def test_a_reason_is_one_of_words_with_numbers() -> None:
    pages = Pages()
    pages.look()
    pages.wait_inside(key(0), key(2))
    (found,) = pages.read(12)  # type: ignore[misc]
    assert isinstance(found, Hung)
    assert found.reason.startswith("hang: ")
