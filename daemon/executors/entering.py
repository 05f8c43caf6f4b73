"""How a node enters a job of the membership store: the first one writes it, all others are admitted."""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.errors import UnreadableRecordError
from rallypoint.daemon.executors.leaderwrites import LeaderWrites
from rallypoint.daemon.executors.membershipview import Keys, View, decode, encode
from rallypoint.daemon.executors.probe import ask
from rallypoint.daemon.executors.store import MembershipStore
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import Plan

NAMESAKE_S: Final = 1.0


class Admit(Protocol):
    """How a job of the store goes on with this node; raises where it cannot: `persist.admit`."""

    def __call__(
        self, stored: JobRecord, *, agreed: dict[str, Any], others: Sequence[MemberRecord]
    ) -> JobRecord: ...


@dataclass(frozen=True)
class Entering:
    """What a node brings along. ``agreed``: the values that all workers of the job share, as JSON."""

    store: MembershipStore
    keys: Keys
    writes: LeaderWrites
    agreed: bytes
    admit: Admit

    async def enter(self, job: JobRecord, plans: Sequence[Plan]) -> None:
        """Write the job, and the last of ``plans``, if the store has none; then be admitted to it."""
        keys = self.keys
        puts, compare = {keys.job: encode(job), keys.agreed: self.agreed}, {keys.job: 0}
        if plans:
            puts[keys.generation], compare[keys.generation] = encode(plans[-1]), 0
        await self._refuse_namesake()
        admitted = False
        while not admitted:  # again, when somebody changed the job meanwhile
            await self.store.compare_and_swap(puts, compare)
            admitted = await self._admitted()

    async def _refuse_namesake(self) -> None:
        """Raises `ConfigError` when another supervisor lives under our name; the record of our own
        earlier life, which may still be there, has a port that is closed."""
        item = await self.store.get(self.keys.member)
        if item is None:
            return
        try:
            there = decode(item, MemberRecord)
        except UnreadableRecordError:
            return  # nobody of this version; our own takes its place
        if there.port and await ask((there.advertise, there.port), NAMESAKE_S) == "answering":
            raise ConfigError(
                f"another supervisor takes part in job {self.keys.job_name!r} under the name "
                f"{there.node!r}, at {there.advertise}:{there.port}; give each node a node.name of its own"
            )

    async def _admitted(self) -> bool:
        """Whether the job was written as this node goes on with it; raises where it is refused, also
        after those were left out whose records are still there, but whose supervisors are gone."""
        listing = await self.store.list(self.keys.prefix)
        items = {item.key: item for item in listing.items}
        stored, agreed = items.get(self.keys.job), items.get(self.keys.agreed)
        view = View.of(self.keys, listing)
        for key in (self.keys.generation, self.keys.job):
            if key in view.unreadable:
                raise view.unreadable[key]
        members = view.members.values()
        others = tuple(m for m in members if m.node != self.keys.node)
        admit = functools.partial(
            self.admit,
            agreed={} if agreed is None else decode(agreed, dict[str, Any]),
        )
        if stored is None:
            return False
        try:
            change = functools.partial(admit, others=others)
            return await self.writes.swap_job(stored, change, {})
        except ConfigError:
            there = await _not_gone(others)
            if len(there) == len(others):
                raise
        change = functools.partial(admit, others=there)
        return await self.writes.swap_job(stored, change, {})


async def _not_gone(others: Sequence[MemberRecord]) -> tuple[MemberRecord, ...]:
    """Those whose supervisor's port is not closed: a lease outlives its holder by ``detect_s``."""
    answers = await asyncio.gather(*(ask((m.advertise, m.port), NAMESAKE_S) for m in others))
    gone = zip(others, answers, strict=True)
    return tuple(member for member, answer in gone if not member.port or answer != "gone")
