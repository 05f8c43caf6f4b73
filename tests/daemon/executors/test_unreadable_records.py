"""Keys of a job that hold something else than a record: nobody dies of that."""

import pytest
from structlog.testing import capture_logs

from rallypoint.daemon.core import events
from rallypoint.daemon.errors import UnreadableRecordError
from rallypoint.daemon.executors.embedded import EmbeddedStore
from tests.daemon.executors.test_membership_executor import (
    JOB,
    Clock,
    Node,
    joined,
    on_store,
    record,
)
from tests.fakes.facts import A, plan

GARBAGE = [b"", b"garbage", b"[]", b"{}", b"\xff", b'{"node": "other"}']


@pytest.mark.parametrize("value", GARBAGE, ids=repr)
def test_what_is_no_record_of_a_member_counts_as_none(value: bytes) -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        prefix = "/rallypoint/default/members/"
        await store.put(f"{prefix}before", value)
        node = await joined(store)
        assert (await node.wait_for(events.LeaderElected)).members == ()
        with capture_logs() as logs:
            await store.put(f"{prefix}later", value)
            node.membership.set_member(record())
            assert (await node.wait_for(events.MembersChanged)).members == (record(),)
            await node.membership._read_all()
        (said,) = [line["reason"] for line in logs if line["event"] == "record_unreadable"]
        assert said.startswith(f"the key {prefix}later holds no MemberRecord of this version")

    on_store(use)


@pytest.mark.parametrize("key", ["job", "generation"])
def test_a_job_that_cannot_be_read_is_refused_to_who_comes_and_kept_by_who_is_there(
    key: str,
) -> None:
    async def use(store: EmbeddedStore, clock: Clock) -> None:
        node = await joined(store)
        await node.wait_for(events.LeaderElected)
        await node.membership.publish(plan(4, A), 0)
        await node.wait_for(events.PlanSeen)
        await store.put(f"/rallypoint/default/{key}", b"garbage")
        late = Node(store, "late", None)
        with pytest.raises(UnreadableRecordError, match=rf"/{key} holds no .* somebody by hand"):
            await late.membership.join(JOB)
        assert not await node.membership.mark_formed(4, {})
        assert "holds no" in (await node.wait_for(events.PublishRefused)).reason
        await node.membership._read_all()
        assert (node.membership.view.plan, node.membership.view.job) != (None, None)
        assert node.membership.view.plan == plan(4, A)

    on_store(use)


def test_a_leader_that_somebody_wrote_by_hand_is_replaced() -> None:
    """It has no lease, and would lead for ever."""

    async def use(store: EmbeddedStore, clock: Clock) -> None:
        await store.put("/rallypoint/default/leader", b"\xffnobody")
        node = await joined(store)
        await node.wait_for(events.LeaderElected)

    on_store(use)
