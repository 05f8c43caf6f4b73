"""Each secret of the configuration is set to a marker, and the marker is in nothing that is written or shown."""

import base64
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import fsspec
import pytest
import trustme

from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.config import Config
from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.fakes.object_stores import SECRET, ObjectStore, s3_store
from tests.faults.injectors.job import ROOT, FaultJob, by_rank

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PASSWORD = "marker-of-the-password"  # noqa: S105 - no secret
PUBLIC = {
    "membership.ca_file",
    "membership.cert_file",
    "metrics.cert_file",
    "metrics.client_ca_file",
}


@dataclass(frozen=True)
class Vault:
    """Servers that ask for secrets, the keys that name them, and what must be seen nowhere."""

    etcd: EtcdCluster
    s3: ObjectStore
    options: dict[str, str]
    files: dict[str, Path]
    """By key of the configuration."""
    markers: dict[str, str]

    def arguments(self) -> list[str]:
        """The configuration, as a command line."""
        pairs = {**self.options, **{key: str(path) for key, path in self.files.items()}}
        return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]

    def found_in(self, texts: dict[str, bytes]) -> list[str]:
        """Where a secret shows, as it is or in base64."""
        shapes = {
            (key, shape)
            for key, marker in self.markers.items()
            for shape in (marker.encode(), base64.b64encode(marker.encode()).rstrip(b"="))
        }
        return [
            f"{key} in {name}" for name, text in texts.items() for key, s in shapes if s in text
        ]


def line_of(key: Path) -> str:
    """One of a PEM file."""
    return key.read_text().splitlines()[2]


def metrics(url: str, authority: str) -> bytes:
    """What Prometheus reads, and what it is told with a wrong password."""
    context = ssl.create_default_context(cafile=authority)
    answers = []
    for password in (PASSWORD, "wrong"):
        token = base64.b64encode(f"prometheus:{password}".encode()).decode()
        request = urllib.request.Request(url, headers={"Authorization": f"Basic {token}"})  # noqa: S310 - our own
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
                answers.append(answer.read())
        except urllib.error.HTTPError as refused:
            answers.append(refused.read() + repr(refused.headers.items()).encode())
    assert b"rallypoint_generation" in answers[0]
    return b"".join(answers)


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    authority, folder = trustme.CA(), tmp_path / "secrets"
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    for name in ("server", "trainer"):
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
    (folder / "password").write_text(f"{PASSWORD}\n")
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "users").write_text(f"prometheus:{hashed}\n")
    tls = ("--cert-file", str(folder / "server.crt"), "--key-file", str(folder / "server.key"))
    verify = ("--client-cert-auth", "--trusted-ca-file", str(folder / "ca.crt"))
    ctl = [
        f"--cacert={folder}/ca.crt",
        f"--cert={folder}/trainer.crt",
        f"--key={folder}/trainer.key",
    ]
    with (
        cluster(tmp_path / "etcd", options=(*tls, *verify), ctl_options=ctl) as etcd,
        s3_store(tmp_path) as s3,
    ):
        for command in (f"user add root:{PASSWORD}", "role add root", "user grant-role root root"):
            etcd.ctl(*command.split())
        etcd.ctl("auth", "enable")
        yield Vault(
            etcd,
            s3,
            {
                "node.name": "a",
                "job.max_workers": "2",
                "membership.backend": "etcd",
                "membership.endpoints": json.dumps(list(etcd.endpoints)),
                "membership.ca_file": str(folder / "ca.crt"),
                "membership.cert_file": str(folder / "trainer.crt"),
                "membership.user": "root",
                "checkpoint.url": s3.place(),
                "metrics.cert_file": str(folder / "server.crt"),
                "log.level": "debug",
            },
            {
                "membership.password_file": folder / "password",
                "membership.key_file": folder / "trainer.key",
                "checkpoint.credentials_file": s3.credentials,
                "metrics.key_file": folder / "server.key",
                "metrics.users_file": folder / "users",
            },
            {
                "membership.password_file": PASSWORD,
                "membership.key_file": line_of(folder / "trainer.key"),
                "checkpoint.credentials_file": SECRET,
                "metrics.key_file": line_of(folder / "server.key"),
                "metrics.users_file": hashed,
            },
        )


def rallypoint(*arguments: str) -> bytes:
    """What a command prints, on both streams, whatever comes of it."""
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint.daemon.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=110,
        cwd=ROOT,
    )
    assert done.stdout
    return done.stdout


def test_every_secret_of_the_configuration_has_a_marker(vault: Vault) -> None:
    named = {path for path, _ in configload.items(Config()) if path.endswith("_file")}
    assert named - PUBLIC == {*vault.files} == {*vault.markers}


def test_no_secret_is_written_or_shown(vault: Vault, tmp_path: Path) -> None:
    """A run with a loss, a store that goes away, and everything that can be asked about it."""
    job = FaultJob(tmp_path / "job" / "run", "--workers", "2", *vault.arguments())
    shown: dict[str, bytes] = {}
    try:
        status = job.settle(workers=2, iterations=6)
        job.kill(status, 1)
        job.settle(workers=2, newer_than={by_rank(status, 1)["slot"]: 1})
        job.wait_logged("checkpoint_committed")
        fs, path = fsspec.core.url_to_fs(vault.options["checkpoint.url"], **vault.s3.options())
        for name in fs.find(path):
            shown[name] = fs.cat_file(name)
        vault.files["checkpoint.credentials_file"].write_text(f'{{"secret": {SECRET}')  # no JSON
        assert SECRET not in job.wait_logged("checkpoint_failed")["error"]
        directory = ("--dir", str(job.rundir.path))
        for command in ("status", "events", "quarantine list"):
            shown[command] = rallypoint(*command.split(), *directory, "--json")
        url = job.status()["metrics_url"]
        shown["metrics"] = metrics(url, vault.options["membership.ca_file"])
        for command in ("config", "config --json", "doctor --only etcd,checkpoints"):
            shown[command] = rallypoint(*command.split(), *vault.arguments())
        shown["etcd"] = vault.etcd.ctl("get", "", "--prefix", f"--user=root:{PASSWORD}").encode()
        job.end(signal.SIGTERM)
    finally:
        job.end_all()
    files = [f for f in (tmp_path / "job").rglob("*") if f.is_file()]
    shown.update({str(f.relative_to(tmp_path)): f.read_bytes() for f in files})
    assert {"job/run.log", "job/run.out", "job/run/journal.jsonl"} <= {*shown}
    assert any(name.endswith("/manifest.json") for name in shown)
    assert b"/rallypoint/" in shown["etcd"]
    assert vault.found_in(shown) == []
    assert vault.found_in({"a test": f"x {SECRET}".encode()}), "markers are looked for"


def test_what_is_wrong_with_a_secret_is_said_without_it(vault: Vault, tmp_path: Path) -> None:
    """Each has something before it in turn, so that it is wrong, and whole."""
    shown = {}
    for key, file in vault.files.items():
        kept = file.read_bytes()
        file.write_bytes(b"x" + kept.replace(b":", b" "))
        if key.startswith("metrics."):  # looked at when a run begins
            shown[key] = rallypoint("run", "--dir", str(tmp_path / "run"), *vault.arguments())
        else:
            shown[key] = rallypoint("doctor", "--only", "etcd,checkpoints", *vault.arguments())
            assert b"fail" in shown[key]
        file.write_bytes(kept)
        assert b"Traceback" not in shown[key]
    assert vault.found_in(shown) == []
