"""Three nodes on three hosts train one job while their etcd fails in every way. One job for all cases."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.injectors.drills import drilled, until
from tests.faults.injectors.etcddrills import LEASE_S, EtcdDrill
from tests.faults.injectors.netns import NODES, SERVERS, NetNodes
from tests.faults.injectors.steppedclock import SteppedClock

pytestmark = [pytest.mark.slow, pytest.mark.faults]

GRACE_S = 20.0
"""``orphan_grace_s``: less than the outages here, more than a supervisor needs to start, on a busy machine too."""
OUTAGE_S = 30.0
STEP_S = 3600
QUOTA_BYTES = 6 * 2**20


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetNodes]:
    grace = ("--set", f"membership.orphan_grace_s={GRACE_S}")
    quota = ("--quota-backend-bytes", str(QUOTA_BYTES))
    with drilled(tmp_path_factory.mktemp("etcd"), *grace, etcd_options=quota) as job:
        yield job


def test_the_leader_of_etcd_is_killed_and_nobody_notices(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        leases, killed = drill.leases(), drill.etcd.leader()
        drill.etcd.kill(killed)
        drill.trains_on()
        assert drill.etcd.leader() != killed
        assert drill.leases() == leases
        drill.etcd.restart(killed)
        assert drill.etcd.wait_until_healthy()
        drill.unnoticed()


def test_the_leader_of_etcd_freezes_and_thaws_and_nobody_notices(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        leases, stopped = drill.leases(), drill.etcd.leader()
        with drill.frozen_servers(stopped):
            drill.trains_on()
            leads = drill.etcd.leader()
            assert leads != stopped
            assert drill.leases(at=leads) == leases
        # As it thaws it may revoke leases that the new leader has kept alive (etcd-io/etcd #15247).
        drill.trains_on()
        until(lambda: set(drill.leases()) == set(NODES), "all records to be there")
        drill.unnoticed()


def test_all_of_etcd_freezes_for_longer_than_any_lease(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        first = job[job.by_rank("a")[0]]
        allowed = len(first.logged("commit_question"))
        with drill.frozen_servers(*range(len(SERVERS))):
            drill.trains_on(2 * LEASE_S)
            asked = first.logged("commit_question")[allowed:]
            assert "past the deadline of its lease" in asked[-1]["reason"]
        until(lambda: set(drill.leases()) == set(NODES), "all records to be there again")
        drill.unnoticed()


@pytest.mark.parametrize("role", ["follower", "leader"])
def test_a_lease_is_revoked_while_its_node_is_well(job: NetNodes, role: str) -> None:
    with EtcdDrill(job) as drill:
        victim = job.leader() if role == "leader" else job.follower()
        leases, lost = drill.leases(), len(job[victim].logged("lease_lost"))
        drill.etcd.ctl("lease", "revoke", leases[victim])
        until(lambda: len(job[victim].logged("lease_lost")) > lost, "the loss to be seen")
        until(lambda: set(drill.leases()) == set(NODES), "its record to be there again")
        assert drill.leases()[victim] != leases[victim]
        drill.trains_on()
        drill.unnoticed()


def test_etcd_is_compacted_under_a_watch_that_is_behind(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        behind = job.follower()
        before = len(job[behind].logged("store_watch_restarted"))
        with drill.frozen_supervisor(behind):
            for number in range(len(SERVERS)):  # whichever it watched on: the stream is gone
                drill.etcd.kill(number)
                drill.etcd.restart(number)
                assert drill.etcd.wait_until_healthy()
            for number in range(3):
                drill.etcd.ctl("put", f"/rallypoint/{job.job}/drill", str(number))
            drill.etcd.ctl("compact", "--physical", str(drill.etcd.revision()))
        restarted = job[behind].wait_until(
            lambda: job[behind].logged("store_watch_restarted")[before:],
            lambda: "a watch that meets the compaction",
        )
        assert "compacted" in restarted[0]["reason"]
        drill.unnoticed()


def test_etcd_is_full_and_a_loss_meanwhile_waits_for_room(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        leases, victim = drill.leases(), job.follower()
        drill.etcd.fill()
        assert "NOSPACE" in drill.etcd.ctl("alarm", "list")
        drill.trains_on()
        drill.kill_worker(victim)
        drill.holds(*NODES, why="database space exceeded")
        time.sleep(LEASE_S)
        assert drill.leases() == leases, "a full store keeps leases"
        drill.holds(*NODES, why="database space exceeded")
        drill.etcd.make_room()
        drill.healed(victim)


def test_the_majority_of_etcd_is_away_for_30_s(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        restarted, victim = job.follower(), job.leader()
        for number in (1, 2):
            drill.etcd.kill(number)
        away_s = time.monotonic()
        job[restarted].wait_logged("store_unavailable")
        drill.restart_supervisor(restarted)  # adopted without etcd, and for longer than its grace
        drill.trains_on(GRACE_S + LEASE_S)
        assert job[restarted].pid == drill.pids[restarted]
        drill.kill_worker(victim)
        drill.holds(*NODES, why="no other generation can be agreed")
        time.sleep(max(0.0, away_s + OUTAGE_S - time.monotonic()))
        drill.holds(*NODES, why="no other generation can be agreed")
        for number in (1, 2):
            drill.etcd.restart(number)
        drill.healed(victim)


def test_all_supervisors_are_restarted_one_after_the_other(job: NetNodes) -> None:
    with EtcdDrill(job) as drill:
        for name in (*drill.rest(job.leader()), job.leader()):
            drill.restart_supervisor(name)
            drill.trains_on(0.0)
        drill.unnoticed()


def test_the_calendar_clock_of_a_node_is_put_an_hour_on_and_back(
    job: NetNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock(job.base)
    with EtcdDrill(job) as drill:
        victim = job.leader()
        drill.crash(victim)
        drill.survived(*drill.rest(victim), cause="worker_lost")
        with monkeypatch.context() as environment:
            for name, value in clock.environment.items():
                environment.setenv(name, value)
            job.start(victim)
        drill.whole(victim)
        for step_s in (STEP_S, -STEP_S):
            clock.step(step_s)
            _wait_until_ahead(job, victim, step_s)
            drill.trains_on()
        clock.step(0)
        drill.unnoticed()


def _wait_until_ahead(job: NetNodes, name: str, step_s: int) -> None:
    """Until the supervisor of a node writes into its journal that its clock is this far from ours."""

    def there() -> bool:
        written_s: float = job[name].journal()[-1]["unix_s"]
        return abs(written_s - time.time() - step_s) < STEP_S / 2

    until(there, f"the clock of {name} to be {step_s} s ahead")
