"""`rallypoint doctor`: what is wrong is found, said with a remedy, and decides the exit code."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.doctor import services
from rallypoint.ops.doctor.command import CHECKS, COMMAND
from rallypoint.ops.doctor.devices import judge_gpus
from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.fakes.supervised import supervised

QUICK = (
    "disk,limits,clock,cores,shared memory,interface,addresses,ports,metrics,etcd,checkpoints,gpu"
)
SETTINGS = ("--metrics-port", "0", "--set", "env.task=pointmass", "--workers", "1")

Findings = list[dict[str, Any]]


def doctor(
    directory: Path, capsys: pytest.CaptureFixture[str], only: str, *options: str
) -> tuple[int, Findings]:
    """Exit code and findings."""
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    given = [*SETTINGS, "--dir", str(directory), "--only", only, "--json", *options]
    code = COMMAND.run(parser.parse_args(given))
    found: Findings = json.loads(capsys.readouterr().out)
    return code, found


def one(found: Findings, level: str) -> dict[str, Any]:
    """The only finding of this level; whatever is wrong has a remedy, whatever is not has none."""
    assert all(bool(f["remedy"]) == (f["level"] != "pass") for f in found), found
    (finding,) = (f for f in found if f["level"] == level)
    return finding


def test_a_machine_on_which_nothing_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "not" / "there"
    code, found = doctor(directory, capsys, QUICK)
    assert code == 0
    assert [f for f in found if f["level"] == "fail"] == []
    assert {f["check"] for f in found} == set(QUICK.split(","))
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


@pytest.mark.slow
def test_the_whole_of_it_as_a_command(tmp_path: Path) -> None:
    code = "from rallypoint.ops.doctor.command import COMMAND as c; import argparse, sys\n"
    code += "p = argparse.ArgumentParser(); c.configure(p); sys.exit(c.run(p.parse_args()))"
    done = subprocess.run(
        [sys.executable, "-c", code, *SETTINGS, "--dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for check in CHECKS:
        assert f" {check}: " in done.stdout
    assert "env and networks of task 'pointmass' were built" in done.stdout


def test_a_port_that_is_taken_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = doctor(tmp_path, capsys, "ports", "--metrics-port", port)
    assert code == 1
    assert "in use" in one(found, "fail")["text"]
    assert "metrics.port" in one(found, "fail")["remedy"]


@pytest.mark.slow
def test_a_run_that_is_under_way_has_its_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with supervised(tmp_path / "run") as run:
        port = run.wait_for_training(2)["metrics_url"].split(":")[2].split("/")[0]
        code, found = doctor(tmp_path / "run", capsys, "ports", "--metrics-port", port)
        assert (code, one(found, "pass")["text"].endswith("runs and has it")) == (0, True)
        assert run.end() == 0


@pytest.mark.parametrize(
    ("only", "setting", "words"),
    [
        ("interface", "node.interface=eth77", "'eth77' is not there; there are"),
        ("addresses", "node.bind=203.0.113.7", "node.bind = '203.0.113.7'"),
        ("addresses", "node.advertise=127.0.0.77", "a connection to port"),
        ("checkpoints", "checkpoint.url=/dev/null/there", "/dev/null/there"),
        ("gpu", "node.devices=[0]", "nvidia-smi"),
    ],
)
def test_what_is_set_wrongly_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    only: str,
    setting: str,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi, wherever this runs
    code, found = doctor(tmp_path, capsys, only, "--set", setting)
    assert code == 1
    assert words in one(found, "fail")["text"]


def test_metrics_that_anybody_may_read_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: tuple[str, ...] = ("--set", "metrics.bind=0.0.0.0")
    code, found = doctor(tmp_path, capsys, "metrics", *opened)
    assert code == 0
    assert "0.0.0.0: not encrypted, for everybody" in one(found, "warn")["text"]
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    for key in ("cert_file", "key_file"):
        opened = (*opened, "--set", f"metrics.{key}={tmp_path / 'server.pem'}")
    (tmp_path / "users").write_text("prometheus:hunter2\n")
    opened = (*opened, "--set", f"metrics.users_file={tmp_path / 'users'}")
    code, found = doctor(tmp_path, capsys, "metrics", *opened)
    assert code == 1
    assert "bcrypt" in one(found, "fail")["text"]
    assert "hunter2" not in one(found, "fail")["text"]


def test_a_store_that_overwrites_is_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the start of a run: checkpoints are kept apart by their names."""
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(services, "refuses_second_create", lambda storage: "it overwrote it")
    code, found = doctor(tmp_path, capsys, "checkpoints")
    assert code == 0
    assert "it overwrote it" in one(found, "warn")["text"]


def test_a_warning_passes_unless_it_is_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = ("--workers", "1000", "--set", "job.max_workers=1000")
    code, found = doctor(tmp_path, capsys, "cores", *many)
    assert (code, one(found, "warn")["check"]) == (0, "cores")
    assert doctor(tmp_path, capsys, "cores", *many, "--strict")[0] == 1


def test_few_open_files_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, level in ((512, "fail"), (2048, "warn"), (65536, "pass")):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        _, found = doctor(tmp_path, capsys, "limits")
        assert f"{files} open files" in one(found, level)["text"]


def test_an_unknown_check_is_refused_with_the_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"no check is named 'teeth'; there are disk, "):
        doctor(tmp_path, capsys, "disk,teeth")


# --- GPUs, as nvidia-smi lists them ------------------------------------------------------------------

FINE = "0, NVIDIA H200, 570.86.15, 41, 3, 143771, 0, No"


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (FINE, "pass", "driver 570.86.15, 41 °C, 3 of 143771 MiB used"),
        (FINE.replace(" 0, No", " 2, No"), "fail", "2 uncorrected memory errors"),
        (FINE.replace("No", "Yes"), "warn", "row remapping pending"),
        (FINE.replace(" 41,", " 91,"), "warn", "91 °C"),
        (FINE.replace(" 3,", " 90000,"), "warn", "90000 of 143771 MiB used"),
        ("0, Tesla T4, 535.1, 40, 3, 15360, [N/A], [N/A]", "pass", "Tesla T4"),
        (FINE.replace("0, NVIDIA", "1, NVIDIA"), "fail", "GPU 0 of node.devices is not there"),
        ("", "fail", "there are none"),
    ],
)
def test_a_gpu_is_judged_by_what_the_driver_says(line: str, level: str, words: str) -> None:
    (finding,) = judge_gpus(line, (0,))
    assert finding.level == level
    assert words in finding.text


# --- etcd ----------------------------------------------------------------------------------------


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    quota = ("--quota-backend-bytes", str(4 * 2**20))
    with cluster(tmp_path / "etcd", options=quota) as servers:
        yield servers


@pytest.mark.slow
def test_etcd_that_answers_that_is_full_and_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], etcd: EtcdCluster
) -> None:
    code, found = doctor(tmp_path, capsys, "etcd", *etcd.settings)
    text = "\n".join(f["text"] for f in found)
    assert (code, {f["level"] for f in found} <= {"pass", "warn"}) == (0, True)
    assert "10 reads in" in text
    assert "not encrypted, on this machine only" in text
    assert "MiB of its quota of 4 MiB are used" in text
    assert "was written under a lease, and removed" in text
    assert etcd.written() == []
    etcd.fill()
    code, found = doctor(tmp_path, capsys, "etcd", *etcd.settings)
    assert code == 1
    assert "alarm disarm" in one(found, "fail")["remedy"]
    assert any(f["level"] == "warn" and "of its quota" in f["text"] for f in found)
    etcd.kill(0)
    code, found = doctor(tmp_path, capsys, "etcd", *etcd.settings)
    assert code == 1
    assert [f["level"] for f in found].count("fail") == 2, "no read, no write"


@pytest.mark.slow
def test_a_certificate_that_expires_soon_and_a_user_without_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    soon = datetime.now(UTC) + timedelta(days=5, hours=1)
    server = authority.issue_cert("127.0.0.1", not_after=soon)
    client = authority.issue_cert("trainer.example", common_name="trainer")
    for name, issued in (("server", server), ("client", client)):
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.crt")
    files = {name: str(tmp_path / name) for name in ("ca.crt", "client.crt", "client.key")}
    options = (
        *("--cert-file", str(tmp_path / "server.crt"), "--key-file", str(tmp_path / "server.key")),
        *("--client-cert-auth", "--trusted-ca-file", files["ca.crt"]),
    )
    ctl = (
        f"--cacert={files['ca.crt']}",
        *(f"--cert={files['client.crt']}", f"--key={files['client.key']}"),
    )
    keys = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
    access = [f"membership.{key}={files[name]}" for key, name in keys.items()]
    with cluster(tmp_path / "etcd", options=options, ctl_options=ctl) as servers:
        given = (*servers.settings, *(word for text in access for word in ("--set", text)))
        code, found = doctor(tmp_path, capsys, "etcd", *given)
        assert code == 0
        assert any(f["level"] == "warn" and "good for 5 days" in f["text"] for f in found)
        for command in (
            *("user add root:secret", "role add root", "user grant-role root root"),
            *("user add trainer --no-password", "role add job"),
            *("role grant-permission --prefix=true job readwrite /another/",),
            *("user grant-role trainer job", "auth enable"),
        ):
            servers.ctl(*command.split())
        code, found = doctor(tmp_path, capsys, "etcd", *given)
        assert code == 1
        refused = [f for f in found if f["level"] == "fail"]
        assert "readwrite" in refused[-1]["remedy"]
