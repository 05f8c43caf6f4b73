"""A plan in the membership store: what is put is what is read, and it stays small."""

import msgspec
import pytest

from rallypoint.daemon.executors.planwire import decode_plan, encode_plan
from rallypoint.daemon.shared.plan import PlannedWorker, WorkerKey
from tests.fakes.facts import A, B, C, plan


def worker(number: int, blocks: tuple[int, ...]) -> PlannedWorker:
    key = WorkerKey(f"node-{number:04d}", number % 8, 1 + number % 3)
    return PlannedWorker(key, number, f"10.1.{number // 256}.{number % 256}", 30000, blocks, 128)


@pytest.mark.parametrize(
    "blocks", [(), (7,), (3, 4, 5, 6), (0, 2, 3, 9), (5, 4), (1, 2, 8, 9, 10, 20)]
)
def test_blocks_come_back_as_they_were(blocks: tuple[int, ...]) -> None:
    whole = msgspec.structs.replace(plan(4, A), members=(worker(0, blocks), worker(1, (99,))))
    assert decode_plan(encode_plan(whole)) == whole


@pytest.mark.parametrize("survivors", [(), (A,), (A, B), (B,), (B, A), (C,)])
def test_survivors_come_back_whoever_they_are(survivors: tuple[WorkerKey, ...]) -> None:
    whole = msgspec.structs.replace(plan(4, A, B), survivors=survivors)
    assert decode_plan(encode_plan(whole)) == whole


def test_who_was_left_out_keeps_the_rank_of_before() -> None:
    left_out = (worker(17, (1,)), worker(3, ()))
    whole = msgspec.structs.replace(plan(9, A, restore=True), left_out=left_out)
    again = decode_plan(encode_plan(whole))
    assert again == whole
    assert again.find(A) == whole.find(A)


def test_a_thousand_workers_are_below_60_kb() -> None:
    members = tuple(worker(n, tuple(range(16 * n, 16 * n + 16))) for n in range(1000))
    whole = msgspec.structs.replace(
        plan(4, A), members=members, survivors=tuple(m.key for m in members)
    )
    data = encode_plan(whole)
    assert len(data) < 60_000 < len(msgspec.json.encode(whole)) / 4
    assert decode_plan(data) == whole
    assert isinstance(msgspec.json.decode(data), dict), "it is JSON"


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_plan(b'{"generation": 1}')
