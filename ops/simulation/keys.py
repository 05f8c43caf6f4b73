"""The keys of the simulated job, and what stands in them."""

from typing import Final, TypeVar

import msgspec

from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.executors.store import KeyValue
from rallypoint.daemon.shared.plan import Plan

T = TypeVar("T")

PREFIX: Final = "/rallypoint/simulated/"
MEMBERS: Final = f"{PREFIX}members/"
LEADER: Final = f"{PREFIX}leader"
GENERATION: Final = f"{PREFIX}generation"
JOB: Final = f"{PREFIX}job"
FIRST_JOB: Final = JobRecord(uid="job", config_hash="hash", versions={"torch": "1"})

_decoded: dict[bytes, object] = {}
"""Values that are read by many nodes are decoded once; records are immutable."""
_KEPT: Final = 512


def encode(record: Plan | JobRecord | MemberRecord) -> bytes:
    """As in the store."""
    return msgspec.json.encode(record)


def plan_of(item: KeyValue) -> Plan:
    """The ``generation`` key."""
    return _decode(item, Plan)


def job_of(item: KeyValue) -> JobRecord:
    """The ``job`` key."""
    return _decode(item, JobRecord)


def member_of(item: KeyValue) -> MemberRecord:
    """A key below ``members/``."""
    return _decode(item, MemberRecord)


def _decode(item: KeyValue, kind: type[T]) -> T:
    found = _decoded.get(item.value)
    if not isinstance(found, kind):
        if len(_decoded) >= _KEPT:
            _decoded.clear()
        found = _decoded[item.value] = msgspec.json.decode(item.value, type=kind)
    return found
