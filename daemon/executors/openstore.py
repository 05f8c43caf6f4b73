"""The membership store that the configuration names, and this node in it."""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from rallypoint.daemon.core.events import LeaderEvent, NodeEvent
from rallypoint.daemon.errors import StoreError
from rallypoint.daemon.executors import persist
from rallypoint.daemon.executors.embedded import EmbeddedStore
from rallypoint.daemon.executors.membership import Membership
from rallypoint.daemon.executors.store import MembershipStore
from rallypoint.daemon.shared import timeouts
from rallypoint.daemon.shared.config import Config, MembershipSection

Observe = Callable[[str, float, StoreError | None], None]


def open_membership(
    config: Config,
    state: persist.PersistedState,
    versions: dict[str, str],
    emit: Callable[[NodeEvent | LeaderEvent], None],
    observe: Observe,
    *,
    fresh: bool,
) -> Membership:
    """This node in the store; it has not joined yet. ``observe`` takes each call to a server, its
    seconds, and why it failed. Raises `ConfigError` like `open_store`."""
    return Membership(
        open_store(config.membership, observe),
        config.job.name,
        config.node.name,
        detect_s=config.membership.detect_s,
        relist_s=timeouts.derive(config).relist_s,
        newest_generation=state.generation,
        bind=None if config.membership.backend == "embedded" else config.node.bind,
        agreed=msgspec.json.encode(state.agreed),
        admit=functools.partial(
            persist.admit, state, config=config, versions=versions, fresh=fresh
        ),
        emit=emit,
    )


def open_store(section: MembershipSection, observe: Observe) -> MembershipStore:
    """Nothing is asked of a server yet. Raises `ConfigError` when a file cannot be read."""
    if section.backend == "embedded":
        return EmbeddedStore()
    # Here, not above: grpc and protobuf cost a tenth of a second and 15 MB at every start.
    from rallypoint.daemon.etcd.connection import Access
    from rallypoint.daemon.etcd.store import EtcdStore

    access = Access(
        endpoints=section.endpoints,
        ca_file=_path(section.ca_file),
        cert_file=_path(section.cert_file),
        key_file=_path(section.key_file),
        user=section.user,
        password_file=_path(section.password_file),
    )
    return EtcdStore(access, detect_s=section.detect_s, observe=observe)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
