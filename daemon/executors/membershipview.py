"""What the membership store says about one job, and where it says it."""

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import UnreadableRecordError
from rallypoint.daemon.executors.following import Span
from rallypoint.daemon.executors.planwire import decode_plan, encode_plan
from rallypoint.daemon.executors.store import KeyValue, Listing
from rallypoint.daemon.shared.plan import Plan, WorkerKey

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Keys:
    """The keys of one job, as one of its nodes uses them."""

    job_name: str
    node: str

    @property
    def prefix(self) -> str:
        return f"/rallypoint/{self.job_name}/"

    @property
    def members(self) -> str:
        return f"{self.prefix}members/"

    @property
    def member(self) -> str:
        return f"{self.members}{self.node}"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def generation(self) -> str:
        return f"{self.prefix}generation"

    @property
    def job(self) -> str:
        return f"{self.prefix}job"

    @property
    def agreed(self) -> str:
        return f"{self.prefix}agreed"

    def followed(self, *, leads: bool) -> tuple[Span, ...]:
        """What a node has to know at once: the leader everything, the others all but other nodes'
        records."""
        if leads:
            return (Span(self.prefix),)
        return Span(self.prefix, self.members), Span(self.member, f"{self.member}\0")


@dataclass
class View:
    """What the store says, as of the last change that was seen."""

    keys: Keys
    members: dict[str, MemberRecord] = field(default_factory=dict)
    plan: Plan | None = None
    job: JobRecord | None = None
    leader: KeyValue | None = None
    revisions: dict[str, int] = field(default_factory=dict)
    """Revision of the last change of each key that is there."""
    unreadable: dict[str, UnreadableRecordError] = field(default_factory=dict)
    """Keys that hold something else. Such a member counts as absent; plan and job stay those of before."""

    @classmethod
    def of(cls, keys: Keys, listing: Listing, before: "View | None" = None) -> "View":
        """The view that a listing of everything gives, after another one."""
        view = cls(keys)
        if before is not None:
            there = {item.key for item in listing.items}
            view.unreadable = {k: e for k, e in before.unreadable.items() if k in there}
            view.plan = before.plan if keys.generation in there else None
            view.job = before.job if keys.job in there else None
        for item in listing.items:
            view.see(item.key, item)
        return view

    def see(self, key: str, item: KeyValue | None) -> None:
        """Take one change; ``item`` None: the key is gone. A plan and a job never go."""
        try:
            self._see(key, item)
        except UnreadableRecordError as error:
            self.members.pop(key.removeprefix(self.keys.members), None)
            if str(error) != str(self.unreadable.get(key)):
                _log.error("record_unreadable", key=key, reason=str(error))
            self.unreadable[key] = error
        else:
            self.unreadable.pop(key, None)

    def _see(self, key: str, item: KeyValue | None) -> None:
        keys = self.keys
        if item is None:
            self.revisions.pop(key, None)
        else:
            self.revisions[key] = item.mod_revision
        if key.startswith(keys.members):
            node = key.removeprefix(keys.members)
            if item is None:
                self.members.pop(node, None)
            else:
                self.members[node] = self._member(node, item)
        elif key == keys.leader:
            self.leader = item
        elif key == keys.generation and item is not None:
            self.plan = decode_plan_in(item)
        elif key == keys.job and item is not None:
            self.job = decode(item, JobRecord)

    def _member(self, node: str, item: KeyValue) -> MemberRecord:
        record = decode(item, MemberRecord)
        if record.node != node:
            raise _unreadable(item, "MemberRecord", ValueError(f"it is of node {record.node!r}"))
        return record

    def forget_others(self) -> None:
        """Keep no record but our own: the others are not followed any more."""
        theirs = {key for key in self.revisions if key.startswith(self.keys.members)}
        for key in theirs - {self.keys.member}:
            self.see(key, None)

    def missed(self, listing: Listing) -> list[str]:
        """Keys whose last change before this listing was never seen here."""
        there = {item.key: item.mod_revision for item in listing.items}
        changed = [key for key, at in there.items() if at > self.revisions.get(key, 0)]
        known = ((key, at) for key, at in self.revisions.items() if key not in there)
        return sorted([*changed, *(key for key, at in known if at <= listing.revision)])

    def sorted_members(self) -> tuple[MemberRecord, ...]:
        return tuple(member for _, member in sorted(self.members.items()))

    def address(self, key: WorkerKey) -> tuple[str, int] | None:
        """Where a worker listens: as its node says, else as the newest plan does."""
        member = self.members.get(key.node)
        for slot in member.slots if member is not None else ():
            if (slot.slot, slot.incarnation) == (key.slot, key.incarnation):
                return slot.host, slot.port
        return None if self.plan is None else self.plan.address(key)

    def newest_generation(self) -> int:
        """The newest generation number that the plan, a member or its checkpoint mentions."""
        known = [0 if self.plan is None else self.plan.generation]
        for member in self.members.values():
            for slot in member.slots:
                known += [slot.last_formed, slot.checkpoint[0] if slot.checkpoint else 0]
        return max(known)


def encode(record: Plan | JobRecord | MemberRecord) -> bytes:
    """The value of a key."""
    if isinstance(record, Plan):
        return encode_plan(record)
    return msgspec.json.encode(record)


def decode(item: KeyValue, kind: type[T]) -> T:
    """The record in a value; a plan's is read by `decode_plan_in`. Raises `UnreadableRecordError`."""
    try:
        return msgspec.json.decode(item.value, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable(item, kind.__name__, error) from error


def decode_plan_in(item: KeyValue) -> Plan:
    """The plan in a value. Raises `UnreadableRecordError`."""
    try:
        return decode_plan(item.value)
    except (msgspec.MsgspecError, ValueError, LookupError) as error:
        raise _unreadable(item, "Plan", error) from error


def _unreadable(item: KeyValue, kind: str, error: Exception) -> UnreadableRecordError:
    return UnreadableRecordError(
        f"the key {item.key} holds no {kind} of this version of rallypoint: {error}; another version, or "
        "somebody by hand, has written it"
    )
