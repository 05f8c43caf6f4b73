"""Registry, packed copies, rollout in hand, and the record of the last collective."""

import threading

import msgspec
import pytest
import torch

from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey
from rallypoint.trainer.elastic.hand import RolloutInHand
from rallypoint.trainer.elastic.packet import (
    Packet,
    build_record,
    check_same_iteration,
    mark,
    marked,
    of_time,
    pack,
    plan_blocks,
    unpack,
)
from rallypoint.trainer.elastic.registry import PackedState, Scope, StateRegistry, hash_text
from rallypoint.trainer.elastic.state import CommitRecord, TrainingState
from rallypoint.trainer.errors import RolloutDropped, StateMismatch, TrainerError


def live() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(5, dtype=torch.float32),
        "n": torch.tensor(7, dtype=torch.int64),
        "m": torch.ones(3, dtype=torch.float64),
        "none": torch.zeros(0),
    }


def make_registry(tensors: dict[str, torch.Tensor]) -> StateRegistry:
    registry = StateRegistry()
    registry.register("model", Scope.REPLICATED, lambda: tensors)
    registry.register("rows", Scope.ENV_ROWS, lambda: {"x": torch.zeros(9)})
    return registry


def test_shared_state_leaves_out_rows_and_orders_by_name() -> None:
    registry = make_registry(live())
    registry.register("a", Scope.GLOBAL, lambda: {"z": torch.zeros(1), "b": torch.zeros(1)})
    assert list(registry.shared()) == ["a/b", "a/z", "model/m", "model/n", "model/none", "model/w"]
    assert registry.scope_of("a/b") is Scope.GLOBAL
    with pytest.raises(ValueError, match="already has an entry named 'a'"):
        registry.register("a", Scope.GLOBAL, dict)


def test_packed_state_round_trips_bit_for_bit_and_hashes_every_byte() -> None:
    tensors = live()
    packed = PackedState(tensors)
    packed.fill_from(tensors)
    before = packed.hash()
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["w"].view(torch.int32)[3] ^= 1  # one unit in the last place
    packed.fill_from(changed)
    assert packed.hash() != before
    packed.load_into(tensors)
    assert torch.equal(tensors["w"], changed["w"])
    assert len(hash_text(before)) == 16


def test_packed_state_refuses_another_layout_by_name() -> None:
    packed = PackedState(live())
    other = live()
    other["w"] = torch.zeros(6)
    with pytest.raises(StateMismatch, match=r"\bw\b"):
        packed.fill_from(other)


def record(iteration: int) -> CommitRecord:
    return CommitRecord(4, iteration, 100 * iteration, (), {}, False, 4)


def test_roll_back_restores_what_was_committed() -> None:
    tensors = live()
    state = TrainingState(make_registry(tensors))
    state.dirty = True
    tensors["w"].mul_(2)
    state.prepare(record(1))
    assert state.commit().iteration == 1
    tensors["w"].zero_()
    state.dirty = True
    state.prepare(record(2))
    state.roll_back()
    assert (state.committed, state.prepared, state.held, state.dirty) == (1, 1, None, False)
    assert tensors["w"].tolist() == [0, 2, 4, 6, 8]
    assert (int(state.iteration), int(state.env_steps)) == (1, 100)


def test_staging_is_swapped_in_whole() -> None:
    source, target = live(), live()
    source["w"].fill_(3)
    giver, taker = TrainingState(make_registry(source)), TrainingState(make_registry(target))
    giver.iteration.fill_(12)
    giver.adopt_live()
    taker.staging.copy_from(giver.snapshot)
    assert target["w"][1] == 1, "nothing is touched before the swap"
    taker.adopt_staging()
    assert target["w"].tolist() == [3] * 5
    assert (taker.committed, taker.prepared) == (12, 12)
    assert taker.snapshot.hash() == giver.snapshot.hash()


class FakeRollout:
    env_steps = 48


def test_a_complete_rollout_can_be_dropped_or_used_once() -> None:
    hand: RolloutInHand[FakeRollout] = RolloutInHand()
    hand.begin((1, 2))
    assert (hand.blocks, hand.rollout) == ((1, 2), None)
    hand.complete(FakeRollout())
    assert hand.rollout is not None
    assert hand.drop() == 48
    assert hand.drop() == 0
    assert hand.blocks == ()
    assert hand.drop() == 0


def _step_until_dropped(hand: RolloutInHand[FakeRollout]) -> None:
    while True:
        hand.stepped(8)


def test_dropping_a_rollout_in_flight_stops_it_and_counts_its_steps() -> None:
    hand: RolloutInHand[FakeRollout] = RolloutInHand()
    hand.begin((0,))
    hand.stepped(8)
    dropped: list[int] = []
    thread = threading.Thread(target=lambda: dropped.append(hand.drop()))
    thread.start()
    with pytest.raises(RolloutDropped):
        _step_until_dropped(hand)
    hand.abandon()
    thread.join(10)
    assert not thread.is_alive()
    assert dropped[0] >= 16
    assert dropped[0] % 8 == 0
    hand.begin((0,))
    hand.stepped(8)  # the next one is not affected


PACKET = Packet(
    generation=4,
    iteration=9,
    newest_plan=4,
    stop=False,
    finite=True,
    state_hash=-5,
    env_steps=48,
    rollout_us=2_000_000,
    update_us=1_500_000,
    cut=(0, 0),
)


def packet(**changes: int | bool | tuple[int, ...]) -> Packet:
    return msgspec.structs.replace(PACKET, **changes)


def test_the_straggler_ratio_is_of_all_ranks() -> None:
    """Slowest over median; of two, the quicker is the median."""
    assert of_time([packet(rollout_us=us) for us in (30, 90, 45)])["straggler_ratio"] == 2.0
    assert of_time([packet(rollout_us=us) for us in (30, 90)])["straggler_ratio"] == 3.0
    assert of_time([packet(rollout_us=0)] * 2)["straggler_ratio"] == 0.0, "held: nothing measured"


def test_packets_round_trip_with_their_bodies() -> None:
    body = torch.tensor([1.5, -2.0], dtype=torch.float64)
    packets, bodies = unpack([pack(packet(stop=True), body), pack(packet(), 2 * body)], 2)
    assert packets == [packet(stop=True), packet()]
    assert bodies[1].tolist() == [3.0, -4.0]


def test_a_rank_elsewhere_or_not_finite_is_an_error_that_names_it() -> None:
    with pytest.raises(TrainerError, match="different iterations"):
        check_same_iteration([packet(), packet(iteration=8)])
    with pytest.raises(TrainerError, match=r"not finite on ranks \[1\]"):
        check_same_iteration([packet(), packet(finite=False)])


def test_the_record_counts_used_steps_and_names_dropped_blocks() -> None:
    members = tuple(PlannedWorker(WorkerKey("n", r, 1), r, "h", 1, (r, r + 2)) for r in range(2))
    plan = Plan(4, "forced", "start", 3, False, False, False, 32, members, ())
    packets = [
        packet(newest_plan=6, cut=mark({2}, (0, 2), 1)),
        packet(newest_plan=5, stop=True, env_steps=24),
    ]
    used = ((0, 2), (1,))
    made = build_record(plan, packets, used, 1000, {"reward_mean": 1.0})
    assert plan_blocks(plan) == ((0, 2), (1, 3))
    assert (made.env_steps_total, made.stop, made.newest_plan) == (1072, True, 5)
    assert [(r.blocks, r.dropped, r.env_steps, r.cut) for r in made.ranks] == [
        ((0, 2), (), 48, (2,)),
        ((1,), (3,), 24, ()),
    ]


def test_a_bit_for_every_block() -> None:
    blocks = tuple(range(100, 300, 2))
    some = {100, 126, 226, 228, 298}
    assert marked(mark(some, blocks, 2), blocks) == tuple(sorted(some))
