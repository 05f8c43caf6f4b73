"""Whether the keys of ``[membership]`` that name a store fit each other."""

import re
from collections.abc import Iterable
from typing import Final

from rallypoint.daemon.shared.config import Config, MembershipSection, NodeSection
from rallypoint.daemon.shared.errors import ConfigError

SHORTEST_LEASE_S: Final = 2.0
"""etcd grants none below, at its default election timeout."""

_ENDPOINT: Final = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s\[\]:/]+):\d{1,5}")


def check(config: Config) -> None:
    """Raises `ConfigError` for what cannot be used as it stands."""
    section = config.membership
    if section.backend == "embedded":
        _refuse_idle(section)
        return
    if not section.endpoints:
        raise ConfigError(
            "membership.backend = 'etcd' needs membership.endpoints, such as "
            '["10.0.0.1:2379", "10.0.0.2:2379", "10.0.0.3:2379"]'
        )
    if config.node.name == NodeSection.name:
        raise ConfigError(
            f"membership.backend = 'etcd' needs node.name, the name of this node among those of the job: set "
            f"it, another on each node; {NodeSection.name!r} is the name where there is one node only"
        )
    if config.job.max_workers is None:
        raise ConfigError(
            "membership.backend = 'etcd' needs job.max_workers, the most workers of all nodes together; "
            "it is the same on every node"
        )
    require_endpoints(section.endpoints, "membership.endpoints")
    for one, other in (("cert_file", "key_file"), ("user", "password_file")):
        if (getattr(section, one) is None) != (getattr(section, other) is None):
            raise ConfigError(
                f"membership.{one} and membership.{other} belong together: set both or neither"
            )
    if section.cert_file is not None and section.ca_file is None:
        raise ConfigError(
            "membership.cert_file is set without membership.ca_file, which turns TLS on: set it to "
            "the authority that signed the servers' certificates"
        )
    if section.detect_s < SHORTEST_LEASE_S:
        raise ConfigError(
            f"membership.detect_s = {section.detect_s:g}: etcd grants no lease below "
            f"{SHORTEST_LEASE_S:g} s; raise it"
        )


def require_endpoints(endpoints: Iterable[str], where: str) -> None:
    """Raises `ConfigError`, naming ``where`` they are given, for one that is none."""
    for endpoint in endpoints:
        if not _ENDPOINT.fullmatch(endpoint) or not 0 < int(endpoint.rpartition(":")[2]) < 65536:
            raise ConfigError(
                f"{where}: {endpoint!r} must be host:port or [IPv6 address]:port, without http://; TLS is "
                "used when ca_file is set"
            )


def _refuse_idle(section: MembershipSection) -> None:
    idle = ("endpoints", "ca_file", "cert_file", "key_file", "user", "password_file")
    for key in idle:
        if getattr(section, key):
            raise ConfigError(
                f"membership.{key} is set, but membership.backend is 'embedded', which uses no server; "
                'set membership.backend = "etcd", or leave it out'
            )
