"""What monitoring sees of this supervisor: its metrics, and the server that shows them."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rallypoint import __version__
from rallypoint.daemon.core.nodestate import NodeState
from rallypoint.daemon.core.records import SHOWN_JOB_STATES
from rallypoint.daemon.executors import status
from rallypoint.daemon.executors.httpd import MonitoringServer
from rallypoint.daemon.executors.metrics import Metrics
from rallypoint.daemon.shared.config import Config


@dataclass(frozen=True)
class Facts:
    """What is looked up at each scrape."""

    status: Mapping[str, Any]
    """The document of ``rallypoint status``."""
    node: NodeState
    leads: bool
    trouble: str
    """Why the membership store does not do what it is asked; "" while it does."""


class Monitoring:
    """Binds its port when it is made. ``tick`` brings the books up to date before they are shown. Raises
    `ConfigError` for what cannot be used as it stands."""

    def __init__(
        self, config: Config, facts: Callable[[], Facts], tick: Callable[[], None]
    ) -> None:
        self.metrics = Metrics()
        self._many = config.membership.backend != "embedded"
        self._facts, self._tick = facts, tick
        self._server = MonitoringServer(
            config.metrics,
            self.metrics.registry,
            refresh=self._refresh,
            why_not_ready=lambda: status.why_not_ready(facts().status),
        )
        info = {"job_name": config.job.name, "node": config.node.name, "version": __version__}
        self.metrics.set("info", 1, **info)
        self.metrics.set("slots", config.node.workers)
        self.metrics.set("lease_seconds", config.membership.detect_s if self._many else math.nan)
        self.start, self.close = self._server.start, self._server.close

    @property
    def url(self) -> str:
        """The whole address of /metrics."""
        return self._server.url

    def lease_renewed(self, node: NodeState, now: float) -> None:
        """The store has confirmed the lease; ``node`` is as it was before."""
        if self._many and math.isfinite(node.lease_until_s):
            margin_s = node.lease_until_s - now
            self.metrics.observe("lease_renewal_margin_seconds", margin_s)

    def _refresh(self) -> None:
        self._tick()
        facts, now = self._facts(), time.monotonic()
        for state in SHOWN_JOB_STATES:
            self.metrics.set("job_state", facts.status["state"] == state, state=state)
        self.metrics.set("leader", facts.leads)
        self.metrics.set("store_trouble", bool(facts.trouble))
        until_s = facts.node.lease_until_s
        known = self._many and math.isfinite(until_s)
        self.metrics.set("lease_margin_seconds", until_s - now if known else math.nan)
