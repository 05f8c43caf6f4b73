"""Three nodes on three hosts, etcd on three more: cables that are pulled, and packets that get lost."""

from collections.abc import Callable, Iterator

import pytest

from tests.faults.injectors.drills import DETECT_S, RENEWED_S, Drill, drilled
from tests.faults.injectors.netns import Direction, NetNodes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

VICTIMS: dict[str, Callable[[NetNodes], str]] = {
    "follower": lambda job: job.follower(),
    "leader": lambda job: job.leader(),
    "rank 0": lambda job: job.by_rank(job.leader())[0],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetNodes]:
    with drilled(tmp_path_factory.mktemp("cuts")) as job:
        yield job


@pytest.mark.parametrize("role", VICTIMS)
def test_the_cable_of_a_node_is_pulled_and_put_back(job: NetNodes, role: str) -> None:
    with Drill(job) as drill:
        victim = VICTIMS[role](job)
        drill.cut(victim)
        seen = drill.survived(*drill.rest(victim), cause="node_lost")
        assert seen["silence_s"] > DETECT_S - RENEWED_S, "nobody is lost before its lease is over"
        job[victim].wait_logged("store_unavailable")
        assert job[victim].status()["generation"] == drill.before[victim]["generation"]
        job.network.heal(victim)
        drill.whole(victim)
        assert job[victim].logged("lease_lost")


def test_a_node_that_is_cut_off_may_not_commit_the_checkpoint_that_it_writes(
    job: NetNodes,
) -> None:
    with Drill(job) as drill:
        victim = job.by_rank(job.leader())[0]
        node = job[victim]
        node.arming.arm(f"checkpoint_save=sleep={3 * DETECT_S}")
        node.wait_fired()
        drill.cut(victim)
        drill.survived(*drill.rest(victim), cause="node_lost")
        refused = node.wait_logged("commit_question", allowed=False)
        assert refused["reason"] == "this supervisor is past the deadline of its lease"
        job.network.heal(victim)
        drill.whole(victim)
        assert refused["iteration"] not in node.checkpoints()


def test_a_leader_that_was_cut_off_cannot_publish_what_it_had_decided(job: NetNodes) -> None:
    with Drill(job) as drill:
        leader = job.leader()
        other, stays = drill.rest(leader)
        node = job[leader]
        node.arming.arm(f"supervisor_publish=sleep={3 * DETECT_S}")
        drill.kill_worker(other)
        node.wait_fired()
        drill.cut(leader)
        job.settle(other, stays)
        job.network.heal(leader)
        node.wait_logged("publish_refused")  # for the newer plan, or before for want of an answer
        published = {line["published"] for line in node.logged("generation_published")}
        assert drill.generation + 1 not in published
        drill.whole(leader)


@pytest.mark.parametrize("direction", ["in", "out"])
def test_what_a_node_gets_or_sends_is_lost_but_not_both(
    job: NetNodes, direction: Direction
) -> None:
    with Drill(job) as drill:
        victim = job.follower()
        drill.strikes()
        job.network.lose(victim, direction)
        drill.survived(*drill.rest(victim), cause="node_lost")
        assert job.network.linked(victim)
        assert job.network.keep(victim)[direction] > 0
        drill.whole(victim)


def test_two_nodes_that_lost_each_other_alone_train_when_the_path_is_mended(job: NetNodes) -> None:
    with Drill(job) as drill:
        leader = job.leader()
        first, second = drill.rest(leader)
        for direction in ("in", "out"):
            job.network.lose(first, direction, peer=second)
        node = job[leader]
        node.wait_until(
            lambda: [
                line
                for line in node.logged("generation_published")
                if line["published"] > drill.generation + 2
            ],
            lambda: "generations that do not form",
        )
        assert min(job.network.keep(first).values()) > 0
        drill.whole()


def test_a_fifth_of_the_packets_is_lost_and_training_goes_on(job: NetNodes) -> None:
    with Drill(job) as drill:
        victim = job.follower()
        for direction in ("in", "out"):
            job.network.lose(victim, direction, percent=20)
        job[victim].wait_until(
            lambda: min(job.network.dropped(victim).values()) > 20, lambda: "packets to be dropped"
        )
        job.settle(*drill.before, iterations=2)
        print(f"lost packets {job.network.keep(victim)}")
        drill.whole()
