"""The unit on a real systemd: started, restarted, stopped, crashed, hung, with real workers."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.etcd_server import EtcdCluster, Seat, cluster
from tests.faults.injectors import netns
from tests.faults.injectors.machine import Machine, boot
from tests.faults.injectors.service import FOLDER, JOB, PREFIX, Service, install

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with boot(tmp_path_factory.mktemp("machine") / "m", "gpu-1") as booted:
        install(booted)
        yield booted


def test_started_it_is_ready_says_what_it_does_and_runs_as_its_user(machine: Machine) -> None:
    service = Service(machine, "ready")
    machine.run("systemctl", "start", service.unit)
    told = machine.run(f"{PREFIX}/bin/rallypoint", "status", "--dir", service.directory, "--json")
    assert json.loads(told)["job"] == "ready", "systemctl comes back when the supervisor answers"
    service.trains()
    machine.wait(
        lambda: service.show("StatusText").startswith("running: generation"),
        lambda: service.show("StatusText"),
    )
    assert machine.run("ps", "-o", "user=", "-p", str(service.main_pid)).strip() == "rallypoint"
    facts = machine.run("stat", "-c", "%a %U", service.directory).strip()
    assert facts.endswith("rallypoint")
    pids = service.pids()
    machine.run("systemctl", "stop", service.unit)
    assert not service.alive(pids)


UNIT = "rallypoint@.service"
FRESH = "Environment=MALLOC_MMAP_THRESHOLD_=4096\n"
"""Memory is given back at once and asked for again: so a new limit of it takes effect."""


@pytest.fixture(scope="module")
def trains(machine: Machine) -> Service:
    """A job that goes on from test to test, each of which leaves it training."""
    service = Service(machine, "trains", drop_in=f"WatchdogSec=8\n{FRESH}")
    service.start()
    return service


@contextmanager
def no_worker_notices(service: Service) -> Iterator[None]:
    """The supervisor is another one afterwards, and that is all."""
    before, pids, main = service.trains(), service.pids(), service.main_pid
    yield
    service.machine.wait(lambda: service.main_pid not in (0, main), lambda: "no new supervisor")
    after = service.trains(beyond=before["iteration"])
    assert service.pids() == pids == service.alive(pids)
    assert after["generation"] == before["generation"]


def test_a_restart_leaves_the_workers_training(trains: Service) -> None:
    """As an upgrade does it."""
    kept = f"/run/rallypoint/{trains.job}/of-a-worker"
    trains.machine.run("touch", kept)
    with no_worker_notices(trains):
        trains.machine.run("systemctl", "restart", trains.unit)
    assert "its workers train on" in trains.log()
    trains.machine.run("test", "-e", kept)


def test_after_a_crash_the_next_supervisor_adopts(trains: Service) -> None:
    with no_worker_notices(trains):
        trains.kill(trains.main_pid, signal.SIGKILL)
    assert "code=killed, status=9/KILL" in trains.log()


def test_a_supervisor_that_hangs_is_replaced_by_the_watchdog(trains: Service) -> None:
    with no_worker_notices(trains):
        trains.kill(trains.main_pid, signal.SIGSTOP)
    assert "Watchdog timeout" in trains.log()


def test_the_journal_has_a_field_for_every_fact(trains: Service) -> None:
    pid = trains.trains()["workers"][0]["pid"]
    query = (f"RALLYPOINT_JOB={trains.job}", "RALLYPOINT_EVENT=worker_started", "PRIORITY=6")
    found = trains.machine.run("journalctl", "-u", trains.unit, *query, "-o", "json").splitlines()
    entries = {entry["RALLYPOINT_PID"]: entry for entry in map(json.loads, found)}
    entry = entries[str(pid)]
    assert entry["RALLYPOINT_NODE"] == "local"
    assert entry["RALLYPOINT_WORKER"].startswith("local/0#")
    assert entry["RALLYPOINT_WORKER"].endswith(f"#{entry['RALLYPOINT_INCARNATION']}")
    assert entry["MESSAGE"] == f"worker_started worker={entry['RALLYPOINT_WORKER']} pid={pid}"
    assert entry["SYSLOG_IDENTIFIER"] == "rallypoint"


def test_a_stop_drains_and_checkpoints(machine: Machine) -> None:
    service = Service(machine, "drain")
    service.start()
    pids = service.pids()
    service.stop()
    assert not service.alive(pids)
    journal = map(json.loads, (service.seen / "journal.jsonl").read_text().splitlines())
    committed = [line["iteration"] for line in journal if line["event"] == "iteration"]
    manifests = (service.seen / "checkpoints").glob("*/manifest.json")
    assert max(json.loads(m.read_text())["iteration"] for m in manifests) == committed[-1]


def armed(job: str, timeout_s: int, more: str = "") -> str:
    """A drop-in: failpoints from a file, and this much time for a stop."""
    where = f"/var/lib/rallypoint/{job}"
    return (
        f"TimeoutStopSec={timeout_s}\n{more}"
        f"Environment=RALLYPOINT_FAILPOINTS=@{where}/failpoints\n"
        f"Environment=RALLYPOINT_FAILPOINT_LOG={where}/fired\n"
    )


def test_a_slow_drain_gets_the_time_that_it_asks_for(machine: Machine) -> None:
    """An iteration that takes longer than TimeoutStopSec: the supervisor asks for more, and nothing is
    killed."""
    service = Service(machine, "slow", drop_in=armed("slow", 8))
    service.write(f"{service.directory[1:]}/failpoints", "")
    service.start()
    service.fire("last_collective:0=sleep=12")
    asked_s = time.monotonic()
    service.stop()
    assert time.monotonic() - asked_s > 8, "over within TimeoutStopSec: no time was asked for"


def test_a_loop_that_hangs_is_replaced_by_the_watchdog(machine: Machine) -> None:
    """The process runs on, and its loop does not: nothing but the loop feeds the watchdog."""
    service = Service(machine, "loop", drop_in=armed("loop", 20, "WatchdogSec=8\n"))
    service.write(f"{service.directory[1:]}/failpoints", "")
    service.start()
    main = service.main_pid
    before = service.status()
    stays, victim = (worker["pid"] for worker in before["workers"])
    service.fire("supervisor_publish=sleep=300", lambda: service.kill(victim, signal.SIGKILL))
    machine.wait(lambda: service.main_pid not in (0, main), lambda: "no new supervisor")
    after = service.trains(beyond=before["iteration"])
    assert "Watchdog timeout" in service.log()
    assert after["workers"][0]["pid"] == stays, "it lost a peer and its supervisor, and trained on"
    service.stop()


def test_what_a_stuck_supervisor_leaves_is_swept(machine: Machine) -> None:
    """Its loop hangs while it publishes a generation, and hears no SIGTERM."""
    service = Service(machine, "stuck", drop_in=armed("stuck", 8, "WatchdogSec=0\n"))
    service.write(f"{service.directory[1:]}/failpoints", "")
    service.start()
    stays, victim = (worker["pid"] for worker in service.status()["workers"])
    service.fire("supervisor_publish=sleep=300", lambda: service.kill(victim, signal.SIGKILL))
    machine.run("systemctl", "stop", service.unit)
    assert service.show("Result") == "timeout"
    assert not service.alive({stays})


def test_a_worker_that_runs_out_of_memory_is_one_worker_lost(trains: Service) -> None:
    """The kernel's own out-of-memory killer, in a memory cgroup of the test around one worker."""
    memory = Path("/sys/fs/cgroup/memory")
    if not (memory / "memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroup v1 is mounted")
    before, main = trains.trains(), trains.main_pid
    stays, victim = (worker["pid"] for worker in before["workers"])
    group = memory / f"rallypoint-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("4096")
        (group / "cgroup.procs").write_text(str(trains.machine.pid_outside(victim)))
        trains.machine.wait(lambda: victim not in trains.pids(), lambda: f"{victim} still runs")
        told = (group / "memory.oom_control").read_text().splitlines()
        assert int(dict(line.split() for line in told)["oom_kill"]) >= 1
    finally:
        trains.machine.wait(lambda: not (group / "cgroup.procs").read_text(), lambda: "not empty")
        group.rmdir()
    after = trains.trains(beyond=before["iteration"])
    assert after["workers"][0]["pid"] == stays
    assert trains.main_pid == main


def test_secrets_come_as_credentials_that_only_the_service_reads(trains: Service) -> None:
    machine, main = trains.machine, str(trains.main_pid)
    place = f"/run/credentials/{trains.unit}"
    environment = machine.run("cat", f"/proc/{main}/environ").split("\0")
    assert f"CREDENTIALS_DIRECTORY={place}" in environment

    def read_as(user: str) -> subprocess.CompletedProcess[str]:
        return machine.try_run(
            *("nsenter", "-t", main, "-m", "--"),
            *("setpriv", f"--reuid={user}", "--clear-groups"),
            *("cat", f"{place}/rallypoint_etcd-password"),
        )

    assert read_as("rallypoint").stdout == "open sesame\n"
    assert read_as("nobody").returncode != 0


def test_a_configuration_that_cannot_be_is_not_tried_again(machine: Machine) -> None:
    service = Service(machine, "wrong", config="[job]\nsed = 1\n")
    assert machine.try_run("systemctl", "start", service.unit).returncode != 0
    machine.wait(
        lambda: service.show("ActiveState") == "failed", lambda: service.show("ActiveState")
    )
    assert service.show("NRestarts") == "0"
    assert service.show("ExecMainStatus") == "2"
    assert "seed" in service.log()


def test_a_supervisor_that_cannot_start_is_tried_for_a_while_then_waits_for_a_person(
    machine: Machine,
) -> None:
    service = Service(machine, "hopeless", drop_in="ExecStart=\nExecStart=/bin/false\n")
    assert machine.try_run("systemctl", "start", service.unit).returncode != 0
    word = "Start request repeated too quickly"
    machine.wait(lambda: word in service.log(), lambda: service.log()[-2000:])
    (burst,) = re.findall(r"^StartLimitBurst=(\d+)$", (FOLDER / UNIT).read_text(), re.MULTILINE)
    assert service.log().count("status=1/FAILURE") == int(burst)
    assert service.show("ActiveState") == "failed"


def test_a_node_that_left_on_a_notice_is_not_started_again(machine: Machine) -> None:
    service = Service(machine, "preempted")
    service.start()
    pids = service.pids()
    drill = ("simulate-notice", "--dir", service.directory, "--in-s", "30", "--json")
    said = json.loads(machine.run(f"{PREFIX}/bin/rallypoint", *drill))
    assert (said["exited"], said["passed"]) == (75, True)
    machine.wait(
        lambda: service.show("ActiveState") == "failed", lambda: service.show("ActiveState")
    )
    assert (service.show("ExecMainStatus"), service.show("NRestarts")) == ("75", "0")
    assert not service.alive(pids)


def test_a_doctor_before_the_start_keeps_a_job_from_a_machine_that_cannot_run_it(
    machine: Machine,
) -> None:
    """The drop-in of the install page; then what the doctor found is mended."""
    (line,) = re.findall(
        r"^ExecStartPre=.* doctor .*$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    ill = f'{JOB}[node]\ninterface = "eth77"\n'
    service = Service(machine, "ill", drop_in=f"{line}\nRestart=no\n", config=ill)
    assert machine.try_run("systemctl", "start", service.unit).returncode != 0
    assert service.show("Result") == "exit-code"
    assert "node.interface = 'eth77' is not there" in service.log()
    assert "remedy: set node.interface to one of them" in service.log()
    assert list(service.seen.iterdir()) == [], "no supervisor has begun anything"
    service.write("etc/rallypoint/ill.toml", JOB)
    service.start()
    assert "pass  disk:" in service.log()
    service.stop()


def test_a_user_for_the_time_of_the_job(machine: Machine) -> None:
    drop_in = FOLDER / "rallypoint@.service.d/50-dynamic-user.conf.example"
    service = Service(machine, "guest", drop_in=drop_in.read_text())
    service.start()
    user = machine.run("ps", "-o", "uid=", "-p", str(service.main_pid)).strip()
    assert 61184 <= int(user) <= 65519, "the range of users that systemd makes"
    groups = (
        machine.run("cat", f"/proc/{service.main_pid}/status")
        .partition("Groups:")[2]
        .split("\n")[0]
    )
    wanted = {machine.run("getent", "group", name).split(":")[2] for name in ("video", "render")}
    assert wanted <= set(groups.split())
    pids = service.pids()
    service.stop()
    assert not service.alive(pids)


def test_two_machines_train_one_job_and_one_of_them_stops(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Two systemds in two network namespaces, etcd in a third."""
    netns.require()
    base = tmp_path_factory.mktemp("two")
    with netns.network(("a", "b", "e0")) as net, ExitStack() as stack:
        seats = [Seat(net.addresses["e0"], net.launcher("e0"))]
        etcd = stack.enter_context(
            cluster(base / "etcd", 1, seats=seats, ctl_launcher=net.observer)
        )
        nodes = {}
        for name in ("a", "b"):
            machine = stack.enter_context(boot(base / name, name, net.space(name)))
            install(machine)
            nodes[name] = Service(machine, "shared", config=member(name, net.addresses[name], etcd))
        for service in nodes.values():
            service.machine.run("systemctl", "start", service.unit)
        before: dict[str, dict[str, Any]] = {}

        def together() -> bool:
            """Each looked at by itself: the second one may have entered between the two looks."""
            before.update({name: service.trains() for name, service in nodes.items()})
            return bool(before["a"]["generation"] == before["b"]["generation"])

        nodes["a"].machine.wait(together, lambda: str(before), 60)
        stays, leaves = nodes["a"], nodes["b"]
        own = {w["pid"] for w in stays.status()["workers"] if w["node"] == "a"}
        leaves.stop()
        stays.machine.wait(
            lambda: stays.status().get("world_size") == 1, lambda: str(stays.status())
        )
        after = stays.trains(beyond=before["a"]["iteration"] + 20, count=1)
        assert {w["pid"] for w in after["workers"]} == own
        assert after["last_change"]["cause"] == "drain"
        stays.stop()


def member(name: str, address: str, etcd: EtcdCluster) -> str:
    """The job's file on one of several machines, with one worker each."""
    store = f'[membership]\nbackend = "etcd"\nendpoints = {json.dumps(list(etcd.endpoints))}\n'
    node = {"name": name, "bind": address, "advertise": address, "interface": netns.INTERFACE}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in node.items())
    job = JOB.replace("[membership]\n", store).replace("[job]\n", "[job]\nmax_workers = 2\n")
    return f"{job}[node]\nworkers = 1\n{lines}"
