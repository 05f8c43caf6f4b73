"""Node, leader and store semantics through kills, joins, broken reports and leader changes in random
order: what DESIGN §4 promises holds after every step, and every quiet time ends in training."""

from collections.abc import Callable

import pytest

from rallypoint.daemon.core import events as ev
from rallypoint.daemon.core.policy import LeaderPolicy
from rallypoint.daemon.core.records import SlotRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from tests.fakes.cluster import Cluster

BLOCKS = 12


def policy(budget: str, slots: int, min_workers: int = 1) -> LeaderPolicy:
    return LeaderPolicy(
        budget="global" if budget == "global" else "per_rank",
        num_envs=8 * (BLOCKS if budget == "global" else 2),
        block=8,
        min_workers=min_workers,
        max_workers=slots,
        coalesce_s=0.05,
        probe_s=0.2,
        join_debounce_s=1.0,
        spares=0,
        detect_s=5.0,
        witness_s=1.0,
        holder_wait_s=15.0,
        alone=False,
        shared_checkpoints=True,
    )


def _records(cluster: Cluster) -> dict[WorkerKey, SlotRecord]:
    """The records that the leader had read when it decided."""
    assert cluster.leader is not None
    return {
        WorkerKey(m.node, s.slot, s.incarnation): s for m in cluster.leader.members for s in m.slots
    }


def check_plan(cluster: Cluster, plan: Plan) -> None:
    """The rules that every plan must keep, as of the moment it is written."""
    assert plan.generation > max(cluster.plans, default=0)
    assert [m.rank for m in plan.members] == list(range(plan.world_size))
    assert 1 <= plan.world_size <= cluster.policy.max_workers
    assert cluster.leader is not None
    seen = cluster.leader.job  # as of its decision; the record may have changed since
    assert seen is not None
    assert plan.hold == (seen.state == "paused" or plan.world_size < cluster.policy.min_workers)
    records = _records(cluster)
    formed = [records[m.key].last_formed for m in plan.members]
    heirs = [f >= max(1, plan.formed) for f in formed]
    if any(heirs):
        assert formed[0] == max(formed), "rank 0 is a newcomer while a survivor lives"
        assert heirs == sorted(heirs, reverse=True), "a newcomer ranks before a survivor"
    if plan.kind == "forced" and any(heirs):
        assert all(heirs), "a forced plan lets a newcomer in while a survivor lives"
    if plan.kind == "planned":
        assert not plan.restore
    if plan.restore:
        _check_restore(cluster, plan)
    _check_blocks(cluster, plan)


def _check_restore(cluster: Cluster, plan: Plan) -> None:
    assert plan.commit_first
    assert plan.survivors == ()
    lingering = [
        w.key
        for w in cluster.live()
        if w.last_formed >= max(1, plan.formed) and not w.frozen and plan.find(w.key) is None
    ]
    assert not lingering, f"restores while {lingering} hold the newest state"


def _check_blocks(cluster: Cluster, plan: Plan) -> None:
    blocks = [b for m in plan.members for b in m.blocks]
    assert len(blocks) == len(set(blocks)), "a block is assigned twice"
    if cluster.policy.budget == "global":
        assert sorted(blocks) == list(range(BLOCKS))
    else:
        assert all(len(m.blocks) == 2 for m in plan.members)
    records = _records(cluster)
    if plan.kind == "forced" or cluster.policy.budget == "per_rank":
        claimed: set[int] = set()
        for member in plan.members:
            held = set(records[member.key].blocks)
            if member.key in plan.survivors:
                assert held - claimed <= set(member.blocks), "a survivor lost a block"
                claimed |= held


def _wish(cluster: Cluster) -> None:
    """An operator pauses, resumes or scales the job."""
    choose = cluster.random
    state = choose.choice(["running", "paused"])
    workers = choose.choice([None, *range(1, cluster.policy.max_workers + 1)])
    cluster.wish(state=state, workers=workers)


def _disturb(cluster: Cluster) -> None:
    """One seeded fault, or a restart after one."""
    choose = cluster.random
    living = cluster.live()
    faults: list[Callable[[], object]] = [cluster.pass_time]
    if living:
        faults += [lambda: cluster.kill(choose.choice(living))] * 3
        faults += [lambda: cluster.blip(choose.choice(living))] * 2
        faults.append(lambda: cluster.freeze(choose.choice(living)))
    faults += [cluster.thaw, lambda: cluster.refuse(choose.randrange(3))]
    if len(cluster.slots) > 1:
        faults.append(cluster.elect)
        for name in cluster.slots:
            if name not in cluster.nodes:
                faults += [lambda n=name: cluster.start_node(n)] * 3  # type: ignore[misc]
            elif len(cluster.nodes) > 1:
                lingers = choose.random() < 0.5
                faults.append(lambda n=name, x=lingers: cluster.lose_node(n, workers_too=not x))  # type: ignore[misc]
    choose.choice(faults)()


def _run(
    seed: int, slots: dict[str, int], budget: str, min_workers: int = 1, *, wishes: bool = False
) -> Cluster:
    total = sum(slots.values())
    cluster = Cluster(policy(budget, total, min_workers), slots, seed, check_plan)
    for _ in range(cluster.random.choice([1, 3, 8])):
        cluster.settle(most=cluster.random.randrange(60))
        for _ in range(cluster.random.choice([1, 1, 2, total])):
            _disturb(cluster)
            if wishes and cluster.random.random() < 0.5:
                _wish(cluster)
    for name in slots:
        if name not in cluster.nodes:
            cluster.start_node(name)
    cluster.thaw()
    cluster.refuse(0)
    return cluster


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["per_rank", "global"])
@pytest.mark.parametrize("slots", [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize("base", range(2))
def test_quiet_ends_in_training_whatever_came_before(
    slots: dict[str, int], budget: str, base: int
) -> None:
    total = sum(slots.values())
    for seed in range(1000 * base, 1000 * base + 25):
        min_workers = 1 + seed % total
        cluster = _run(seed, slots, budget, min_workers)
        before = len(cluster.plans)
        cluster.settle(until=lambda c=cluster, n=total: len(c.live()) == n and c.trains())  # type: ignore[misc]
        assert cluster.trains(), f"seed {seed}: {cluster.plan} {cluster.job}"
        assert len(cluster.live()) == total, f"seed {seed}"
        assert len(cluster.plans) - before <= 12, f"seed {seed}: plans without an end"


@pytest.mark.parametrize("base", range(3))
@pytest.mark.parametrize("slots", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_wishes_of_operators_are_kept_whatever_happens(slots: dict[str, int], base: int) -> None:
    total = sum(slots.values())
    for seed in range(2000 + 100 * base, 2000 + 100 * base + 12):
        cluster = _run(seed, slots, "global", 1 + seed % 2, wishes=True)
        wanted = 2 + seed % (total - 1)
        cluster.wish(state="paused", workers=wanted)

        def shaped(c: Cluster = cluster, n: int = wanted, *, hold: bool = True) -> bool:
            plan = c.plan
            formed = plan is not None and c.job.formed == plan.generation
            shape = None if plan is None else (plan.world_size, plan.hold)
            read = not c.leader_line  # what the leader has not read yet, it may act against once
            return read and formed and shape == (n, hold) and len(c.live()) == total

        cluster.settle(until=shaped)
        assert shaped(), f"seed {seed}: {cluster.plan} {cluster.job}"
        paused = max(cluster.committed, default=0)
        cluster.settle(most=50)
        assert max(cluster.committed, default=0) == paused, "nobody trains while it is paused"
        cluster.wish(state="running", workers=None)
        cluster.settle(until=lambda c=cluster, n=total: len(c.live()) == n and c.trains())  # type: ignore[misc]
        assert cluster.trains(), f"seed {seed}: {cluster.plan} {cluster.job}"


@pytest.mark.parametrize("seed", range(24))
def test_stop_ends_every_node_whatever_came_before(seed: int) -> None:
    slots = {"a": 2, "b": 2} if seed % 2 else {"a": 3}
    cluster = _run(seed, slots, "per_rank")
    asked_s = cluster.now
    for name in slots:
        cluster.order(name, ev.StopRequested("SIGTERM"))

    def over() -> bool:
        return all(n.exit_code is not None for n in cluster.nodes.values())

    cluster.settle(until=over)
    assert [n.exit_code for n in cluster.nodes.values()] == [0] * len(slots)
    assert not cluster.live()
    assert cluster.now - asked_s < 30.0, "it took the grace, not the agreement"


@pytest.mark.parametrize("seed", range(24))
def test_drain_leaves_the_other_node_training(seed: int) -> None:
    cluster = _run(seed, {"a": 2, "b": 2}, "global")
    cluster.settle(until=lambda: len(cluster.live()) == 4 and cluster.trains())
    cluster.order("a", ev.DrainRequested(None))
    cluster.settle(until=lambda: cluster.nodes["a"].exit_code is not None and cluster.trains())
    assert cluster.nodes["a"].exit_code == 0
    assert cluster.trains()
    assert {w.key.node for w in cluster.live()} == {"b"}
    last_of_a = max(
        g for g, p in cluster.plans.items() if any(m.key.node == "a" for m in p.members)
    )
    assert cluster.plans[last_of_a + 1].cause == "drain"
