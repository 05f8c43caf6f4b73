"""The example's way to a supervisor that is protected: TLS, a client certificate, a user."""

import time
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import bcrypt
import pytest
import trustme
import yaml

from tests.fakes.prometheus import START_S, prometheus, wait_until
from tests.fakes.supervised import supervised
from tests.project import ROOT

pytestmark = pytest.mark.slow

PASSWORD = "correct horse"  # noqa: S105 - of this test alone


def protected(directory: Path) -> tuple[str, ...]:
    """Options of a supervisor, whose files are here, with those of its client."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "prometheus")):
        certificate = ca.issue_cert(identity)
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
    (directory / "password").write_text(PASSWORD)
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (directory / "users").write_text(f"prometheus:{hashed}\n")
    files = {
        "cert_file": "server.pem",
        "key_file": "server.key",
        "client_ca_file": "ca.pem",
        "users_file": "users",
    }
    return tuple(
        word
        for key, name in files.items()
        for word in ("--set", f"metrics.{key}={directory / name}")
    )


def from_example(directory: Path, target: str) -> dict[str, Any]:
    """The example's entry for one job, with other files and one target."""
    text = (ROOT / "ops/prometheus/prometheus.example.yml").read_text()
    text = text.replace("/etc/prometheus/rallypoint", str(directory))
    scrape: dict[str, Any] = yaml.safe_load(text)["scrape_configs"][0]
    return scrape | {"static_configs": [{"targets": [target], "labels": {"instance": "a"}}]}


def test_the_example_reaches_a_supervisor_that_asks_for_a_certificate_and_a_user(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path / "run", *protected(tmp_path)) as running:
        url = running.wait_for_training(2)["metrics_url"]
        right = from_example(tmp_path, urlsplit(url).netloc)
        stranger, nobody = deepcopy(right), deepcopy(right)
        stranger["job_name"], nobody["job_name"] = "without a password", "without a certificate"
        del stranger["basic_auth"], nobody["tls_config"]["cert_file"]
        del nobody["tls_config"]["key_file"]
        with prometheus(tmp_path, [right, stranger, nobody]) as server:
            expected = {"walk": 1, "without a password": 0, "without a certificate": 0}

            def seen() -> bool:
                up = server.instant("up", time.time())
                return {one.labels["job"]: one.points[-1][1] for one in up} == expected

            wait_until(seen, f"targets to be {expected}", START_S)
            (size,) = server.instant("rallypoint_world_size", time.time())
            assert (size.labels["job"], size.labels["instance"]) == ("walk", "a")
            assert size.points[-1][1] == 2
        assert running.end() == 0
