"""A supervisor with fake workers whose membership lives on a real etcd."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.executors import proctable
from tests.fakes.etcd_server import NODE, EtcdCluster, cluster
from tests.fakes.supervised import WAIT_S, Status, Supervised, pids, supervised

pytestmark = [pytest.mark.slow, pytest.mark.faults]

QUOTA_BYTES = 4 * 2**20


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with cluster(tmp_path / "etcd") as servers:
        yield servers


def start(run: Supervised, workers: int = 2) -> Status:
    return run.wait_for_training(workers)


def kill_rank_1(status: Status) -> int:
    """SIGKILL to the worker of rank 1; the slot of the other."""
    by_rank = {w["rank"]: w for w in status["workers"]}
    os.kill(by_rank[1]["pid"], signal.SIGKILL)
    slot: int = by_rank[0]["slot"]
    return slot


def test_a_loss_heals_and_the_next_life_goes_on(etcd: EtcdCluster, tmp_path: Path) -> None:
    with supervised(tmp_path / "run", *etcd.settings) as run:
        before = start(run)
        assert f"/rallypoint/default/members/{NODE}" in etcd.written()
        survivor = kill_rank_1(before)
        after = run.wait_for(lambda s: s["generation"] > before["generation"] + 1)
        assert pids(after)[survivor] == pids(before)[survivor]
        healed = run.wait_for_training(2)
        assert run.end() == 0
    left = ("agreed", "generation", "job")
    assert etcd.written() == [f"/rallypoint/default/{name}" for name in left]
    with supervised(tmp_path / "run", *etcd.settings) as run:
        resumed = start(run)
        assert resumed["generation"] > healed["generation"]
        assert resumed["iteration"] >= healed["iteration"]
        assert run.end() == 0


def test_without_etcd_training_goes_on_and_a_loss_heals_after(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with supervised(tmp_path / "run", *etcd.settings) as run:
        before = start(run)
        run.wait_for(lambda _: run.metrics()["lease_renewal_margin_seconds_count"] > 0)
        etcd.kill(0)
        trained = run.wait_for(lambda s: s["iteration"] >= before["iteration"] + 5)
        assert trained["generation"] == before["generation"]
        run.wait_for(lambda _: bool(run.logged("store_unavailable")))
        survivor = kill_rank_1(before)
        held = run.wait_for(
            lambda s: s["state"] == "holding" and "ready" in {w["state"] for w in s["workers"]}
        )
        assert held["generation"] == before["generation"]
        why = (
            f"of generation {before['generation']} is gone, and no other generation can be agreed: "
        )
        assert why in held["reason"]
        values = run.metrics()
        assert (values["store_trouble"], values['job_state{state="holding"}']) == (1, 1)
        assert values['etcd_errors_total{kind="unavailable"}'] > 0
        assert values["lease_margin_seconds"] < values["lease_seconds"]
        assert values["lease_renewal_margin_seconds_count"] > 0
        assert values["recovery_age_seconds"] > 0, "it rises while nothing can be agreed"
        etcd.restart(0)
        after = run.wait_for(lambda s: s["generation"] > before["generation"])
        assert pids(after)[survivor] == pids(before)[survivor]
        healed = run.wait_for_training(2)
        assert healed["iteration"] >= trained["iteration"]
        assert run.logged("store_back")
        assert run.end() == 0


def test_a_full_etcd_holds_a_loss_until_there_is_room_again(tmp_path: Path) -> None:
    with (
        cluster(tmp_path / "etcd", options=("--quota-backend-bytes", str(QUOTA_BYTES))) as etcd,
        supervised(tmp_path / "run", *etcd.settings) as run,
    ):
        before = start(run)
        etcd.fill()
        trained = run.wait_for(lambda s: s["iteration"] >= before["iteration"] + 5)
        assert (trained["state"], trained["reason"]) == ("running", None)
        survivor = kill_rank_1(before)
        held = run.wait_for(lambda s: s["state"] == "holding")
        assert "database space exceeded" in held["reason"]
        assert run.metrics()['etcd_errors_total{kind="quota"}'] > 0
        assert not run.logged("lease_lost")
        etcd.make_room()
        healed = run.wait_for_training(2)
        assert pids(healed)[survivor] == pids(before)[survivor]
        assert len(run.logged("store_unavailable")) == len(run.logged("store_back")) == 1
        assert run.end() == 0


def test_the_next_supervisor_adopts(etcd: EtcdCluster, tmp_path: Path) -> None:
    patient = {"grace_s": 60.0}
    with supervised(tmp_path / "run", *etcd.settings, worker=patient) as run:
        before = start(run)
        run.end(signal.SIGKILL)
        with supervised(tmp_path / "run", *etcd.settings, worker=patient) as successor:
            after = successor.wait_for(
                lambda s: (
                    (s["iteration"] or 0) > before["iteration"] + 2 and pids(s) == pids(before)
                )
            )
            assert after["generation"] == before["generation"]
            kill_rank_1(after)  # the lead of the one before runs out, and is taken over
            successor.wait_for(lambda s: s["generation"] > after["generation"] + 1)
            assert successor.end() == 0


def test_without_etcd_the_next_supervisor_adopts(etcd: EtcdCluster, tmp_path: Path) -> None:
    patient = {"grace_s": 60.0}
    with supervised(tmp_path / "run", *etcd.settings, worker=patient) as run:
        before = start(run)
        run.wait_for(lambda _: run.metrics()["lease_renewal_margin_seconds_count"] > 0)
        etcd.kill(0)
        run.end(signal.SIGKILL)
        with supervised(tmp_path / "run", *etcd.settings) as successor:
            # Its status has what workers tell it: they are connected, and no orphans any more.
            heard = successor.wait_for(lambda s: s["iteration"] > before["iteration"] + 5)
            trained = successor.wait_for(
                lambda s: s["iteration"] > heard["iteration"] + 20 and pids(s) == pids(before)
            )
            assert (trained["state"], trained["reason"]) == ("running", None)
            successor.wait_for(lambda _: bool(successor.logged("store_unavailable")))
            etcd.restart(0)
            successor.wait_for(lambda _: bool(successor.logged("store_back")))
            after = successor.wait_for(lambda s: s["iteration"] > trained["iteration"] + 10)
            assert (after["generation"], pids(after)) == (before["generation"], pids(before))
            assert successor.end() == 0


def test_without_etcd_a_supervisor_that_comes_late_waits_and_then_restores(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with supervised(tmp_path / "run", *etcd.settings) as run:
        before = start(run)
        run.wait_for(lambda _: run.metrics()["lease_renewal_margin_seconds_count"] > 0)
        etcd.kill(0)
        run.end(signal.SIGKILL)
        deadline_s = time.monotonic() + WAIT_S
        while any(proctable.lives(p.pid, p.start_ticks) for p in run.workers()):
            assert time.monotonic() < deadline_s, "workers without a supervisor do not leave"
            time.sleep(0.02)
        with supervised(tmp_path / "run", *etcd.settings) as late:
            waits = late.wait_for(lambda s: "no answer within" in (s["reason"] or ""))
            assert waits["state"] == "starting"
            assert late.logged("store_unavailable")
            assert len(late.logged("worker_started")) == 2, "those of the life before"
            etcd.restart(0)
            after = start(late)
            assert (after["state"], after["reason"]) == ("running", None)
            assert after["generation"] > before["generation"]
            assert late.end() == 0


def test_it_waits_for_an_etcd_that_is_not_there_yet(etcd: EtcdCluster, tmp_path: Path) -> None:
    etcd.kill(0)
    with supervised(tmp_path / "run", *etcd.settings) as run:
        run.wait_for(lambda _: bool(run.logged("store_unavailable")))
        assert run.end() == 0
    with supervised(tmp_path / "run", *etcd.settings) as run:
        status = run.wait_for(lambda _: len(run.logged("store_unavailable")) == 2)
        assert status["generation"] is None
        etcd.restart(0)
        start(run)
        assert run.end() == 0


def test_another_job_of_the_same_name_is_refused(etcd: EtcdCluster, tmp_path: Path) -> None:
    with supervised(tmp_path / "first", *etcd.settings) as run:
        start(run)
        assert run.end() == 0
    with supervised(tmp_path / "second") as run:  # membership of its own
        start(run)
        assert run.end() == 0
    for directory, options, reason in (
        ("second", (), "holds another job 'default'"),
        ("third", ("--set", "job.seed=7"), "other values (job.seed: 1 -> 7;"),
    ):
        with supervised(tmp_path / directory, *etcd.settings, *options) as run:
            assert run.process.wait(60) != 0
            assert reason in run.log_path.read_text()


def test_a_password_that_etcd_refuses_ends_the_start(etcd: EtcdCluster, tmp_path: Path) -> None:
    for command in ("user add root:right", "role add root", "user grant-role root root"):
        etcd.ctl(*command.split())
    etcd.ctl("auth", "enable")
    (tmp_path / "password").write_text("wrong")
    access = ("membership.user=root", f"membership.password_file={tmp_path / 'password'}")
    options = (*etcd.settings, *(part for one in access for part in ("--set", one)))
    with supervised(tmp_path / "run", *options) as run:
        assert run.process.wait(60) != 0
        assert "authentication failed" in run.log_path.read_text()
        (tmp_path / "password").write_text("right")
    with supervised(tmp_path / "run", *options) as run:
        start(run)
        assert run.end() == 0
