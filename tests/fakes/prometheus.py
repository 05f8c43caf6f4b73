"""Real Prometheus and Alertmanager on loopback, for tests, and a receiver of what is notified."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rallypoint.ops.grafana.prometheus import Prometheus

PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "amtool": "prometheus-alertmanager",
    "prometheus-alertmanager": "prometheus-alertmanager",
}
"""Debian's package of each program."""
START_S = 30.0
POLL_S = 0.05
INTERVAL = "1s"
"""Between two scrapes, and between two evaluations of the rules; longer than a scrape on a busy machine."""

Alert = dict[str, Any]

T = TypeVar("T")


def program(name: str) -> str:
    """Path of a program; skips the test where it is not installed."""
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {PACKAGES[name]}")
    return found


class Webhook:
    """What Alertmanager has notified, one entry per alert and notification."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._alerts: list[Alert] = []
        self._came = threading.Condition()

    def take(self, document: Mapping[str, Any]) -> None:
        with self._came:
            self._alerts += document["alerts"]
            self._came.notify_all()

    def wait_for(self, name: str, status: str, timeout_s: float) -> Alert:
        """The first notification of this alert as ``firing`` or ``resolved``."""

        def found() -> Alert | None:
            matching = (
                alert
                for alert in self._alerts
                if (alert["labels"]["alertname"], alert["status"]) == (name, status)
            )
            return next(matching, None)

        with self._came:
            alert = self._came.wait_for(found, timeout_s)
            assert alert is not None, f"{name} {status}: not within {timeout_s} s; {self._alerts}"
            return alert


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.take(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the test looks at what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Webhook(f"http://127.0.0.1:{server.server_address[1]}/")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def alertmanager(directory: Path, receiver: str) -> Iterator[str]:
    """An Alertmanager that notifies this URL at once; its address, ``host:port``."""
    config = {
        "route": {"receiver": "test", "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "test", "webhook_configs": [{"url": receiver}]}],
    }
    file = _write(directory / "alertmanager.yml", config)
    with _server(
        *(program("prometheus-alertmanager"), f"--config.file={file}"),
        *(f"--storage.path={directory / 'alertmanager'}", "--cluster.listen-address="),
        log_path=directory / "alertmanager.log",
    ) as address:
        yield address


@contextmanager
def prometheus(
    directory: Path,
    scrapes: Sequence[Mapping[str, Any]],
    *,
    rules: Sequence[Path] = (),
    alertmanagers: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """A server with these entries of ``scrape_configs``, on a free port."""
    config = {
        "global": {
            "scrape_interval": INTERVAL,
            "scrape_timeout": INTERVAL,
            "evaluation_interval": INTERVAL,
        },
        "rule_files": [str(path) for path in rules],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [*alertmanagers]}]}]},
        "scrape_configs": [*scrapes],
    }
    file = _write(directory / "prometheus.yml", config)
    with _server(
        *(program("prometheus"), f"--config.file={file}"),
        *(f"--storage.tsdb.path={directory / 'prometheus'}", "--rules.alert.resend-delay=1s"),
        log_path=directory / "prometheus.log",
    ) as address:
        yield Prometheus(f"http://{address}")


def rule_errors(server: Prometheus) -> dict[str, str]:
    """Rules that could not be evaluated, with what Prometheus says of each."""
    with urllib.request.urlopen(f"{server.url}/api/v1/rules", timeout=10) as answer:  # noqa: S310
        groups = json.load(answer)["data"]["groups"]
    rules = (rule for group in groups for rule in group["rules"])
    return {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}


def _write(path: Path, config: Mapping[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(config, indent=1))
    return path


@contextmanager
def _server(*command: str, log_path: Path) -> Iterator[str]:
    """A server on a port that the kernel chose; it logs which."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=subprocess.STDOUT
        )
    try:

        def listening() -> str:
            assert process.poll() is None, f"{command[0]} ended:\n{log_path.read_text()}"
            text = log_path.read_text()
            found = re.search(r'msg="Listening on" address=(\S+)\n', text)
            return found[1] if found and _ready(found[1]) else ""

        yield wait_until(listening, f"{command[0]} to be ready, see {log_path}", START_S)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(address: str) -> bool:
    """It serves some time before it is ready, and refuses all but this question meanwhile."""
    try:
        urllib.request.urlopen(f"http://{address}/-/ready", timeout=10).close()
    except OSError:
        return False
    return True


def wait_until(look: Callable[[], T], what: str, timeout_s: float) -> T:
    """The first thing that ``look`` finds that is true."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"waited {timeout_s} s for {what}")
