"""A Prometheus of our own for a while, for those who have none: scrapes supervisors every two seconds."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.ops.grafana.prometheus import Prometheus, PrometheusError

SCRAPE_S: Final = 2.0
_START_S: Final = 30.0
_END_S: Final = 10.0
_ATTEMPTS: Final = 3
_POLL_S: Final = 0.05


class ScraperError(RallypointError):
    """There is no Prometheus here, or it does not start."""


class Scraper:
    """The running server, with what it scrapes."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._targets = folder / "targets.json"
        self._log = folder / "prometheus.log"
        self.aim({})
        port = _free_port()
        self.server = Prometheus(f"http://127.0.0.1:{port}")
        (folder / "prometheus.yml").write_text(_configuration(self._targets))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(binary, f"--config.file={folder / 'prometheus.yml'}"),
                    *(f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"),
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def aim(self, metrics_urls: Mapping[tuple[str, str], str]) -> None:
        """Scrape these from now on: addresses by (job, node)."""
        groups = [
            {
                "targets": [urlsplit(url).netloc],
                "labels": {"job": job, "instance": node, "__scheme__": urlsplit(url).scheme},
            }
            for (job, node), url in metrics_urls.items()
        ]
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps(groups))
        new.replace(self._targets)

    def wait_ready(self) -> bool:
        """Whether it answers in time; False when it has ended. Raises `ScraperError`."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                return False
            try:
                self.server.instant("vector(1)", time.time())
            except PrometheusError:
                time.sleep(_POLL_S)
            else:
                return True
        raise ScraperError(f"prometheus did not answer within {_START_S:g} s: {self.said()}")

    def scraped(self, count: int) -> bool:
        """Whether there are this many samples of a supervisor."""
        samples = self.server.samples("rallypoint_generation[5m]", time.time())
        return any(len(series.points) >= count for series in samples)

    def why_not(self) -> str:
        """What was in the way of the last scrape."""
        reasons = self.server.scrape_errors()
        return "; ".join(reasons) or "no scrape has ended yet"

    def said(self) -> str:
        """Last words of its log."""
        return self._log.read_text(errors="replace")[-500:].strip()

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def scraper(folder: Path) -> Iterator[Scraper]:
    """A server that answers, with its files in ``folder``. A port that somebody took meanwhile is
    replaced. Raises `ScraperError`."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise ScraperError(
            "there is no program `prometheus` in PATH to watch the run with: apt-get install prometheus,"
            " or give the address of yours with --prometheus"
        )
    for _ in range(_ATTEMPTS):
        running = Scraper(binary, folder)
        try:
            if running.wait_ready():
                yield running
                return
        finally:
            running.close()
    raise ScraperError(f"prometheus ended at its start: {running.said()}")


def _configuration(targets: Path) -> str:
    return f"""\
global:
  scrape_interval: {SCRAPE_S:g}s
scrape_configs:
  - job_name: rallypoint
    file_sd_configs:
      - files: [{json.dumps(str(targets))}]
        refresh_interval: 1s
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
