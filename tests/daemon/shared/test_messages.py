"""Frames of the control socket: what is taken, and what is refused in words."""

import pytest

from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.errors import ProtocolError
from rallypoint.daemon.shared.plan import Plan, PlannedWorker, WorkerKey

KEY = WorkerKey("local", 0, 1)
PLAN = Plan(
    generation=3,
    kind="forced",
    cause="worker_lost",
    formed=2,
    restore=False,
    hold=False,
    commit_first=False,
    budget_envs=8,
    members=(PlannedWorker(KEY, 0, "127.0.0.1", 1234, (0, 2)),),
    survivors=(KEY,),
)
FROM_WORKER = messages.Committed(
    key=KEY,
    generation=3,
    iteration=7,
    env_steps_total=99,
    state_hash="ab",
    ranks=(messages.RankRecord(KEY, (0, 2), (), 99),),
    metrics={"reward_mean": 0.5},
    activity={"rollout": 1.0},
)


def test_messages_survive_any_cutting_of_the_stream() -> None:
    stream = messages.encode(FROM_WORKER) * 3
    for size in (1, 3, 7, len(stream)):
        reader = messages.FrameReader()
        bodies = [
            body
            for at in range(0, len(stream), size)
            for body in reader.feed(stream[at : at + size])
        ]
        assert [messages.decode_from_worker(body) for body in bodies] == [FROM_WORKER] * 3


def test_a_plan_comes_back_equal() -> None:
    frame = messages.encode(messages.PlanPublished(plan=PLAN))
    (body,) = messages.FrameReader().feed(frame)
    assert messages.decode_from_supervisor(body) == messages.PlanPublished(plan=PLAN)
    assert PLAN.starts == "now"
    assert PLAN.rank0.key == KEY


def test_unknown_fields_are_ignored_and_unknown_types_refused() -> None:
    known = b'{"type":"formedmark","generation":4,"news":1}'
    assert messages.decode_from_supervisor(known) == messages.FormedMark(generation=4)
    for body in (b'{"type":"news"}', b'{"generation":4}', b'{"type":"formedmark"}', b"\xff", b"[]"):
        with pytest.raises(ProtocolError, match="control socket"):
            messages.decode_from_supervisor(body)
        with pytest.raises(ProtocolError, match="control socket"):
            messages.decode_from_worker(body)


def test_both_directions_bound_the_size() -> None:
    big = messages.Progress(key=KEY, stage="x" * (messages.MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="Progress of"):
        messages.encode(big)
    header = (messages.MAX_FRAME_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="over the"):
        list(messages.FrameReader().feed(header))
