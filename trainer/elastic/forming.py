"""Forming a generation: arrive, build the group, see who is where, sync state, compare hashes.

Runs while the main thread waits, or beside a rollout that is in flight: live parameters are not
touched then unless this rank is behind, and in that case its rollout is dropped first.
"""

import random
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.timeouts import Timeouts
from rallypoint.trainer.elastic import storeclient
from rallypoint.trainer.elastic.group import ProcessGroup
from rallypoint.trainer.elastic.presence import Presence
from rallypoint.trainer.elastic.protocol import (
    Decision,
    Whereabouts,
    contributions,
    decide_source,
    majority,
)
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.errors import GroupBroken, StateMismatch, Superseded

_POLL_S = 0.002
_INIT_FAULT_SPREAD_S = 0.02


@dataclass(frozen=True)
class Formation:
    """A formed generation as this rank sees it."""

    plan: Plan
    rank: int
    decision: Decision
    source: WorkerKey
    contributions: tuple[tuple[int, ...], ...]
    """Blocks per rank for the first iteration."""
    state_hash: int
    received: bool
    """This rank took the source's state."""
    seconds: dict[str, float]


class Host(Protocol):
    """What forming needs of the session that it forms for."""

    @property
    def presence(self) -> Presence: ...
    def whereabouts(self) -> Whereabouts: ...
    def newest_generation(self) -> int: ...
    def check_orders(self) -> None:
        """Raises `Left` when this worker has to leave."""

    def set_phase(self, phase: str) -> None: ...
    def drop_rollout(self) -> None:
        """End the rollout in flight, if any, and count its steps as dropped; blocks until it is."""

    def apply_held(self) -> None:
        """Commit the result of the last collective that every survivor holds."""

    def rolled_back(self) -> None:
        """What was made of the state since the last commit is thrown away."""

    def begin(self, plan: Plan) -> None:
        """Take the live state, as it was built or as a warm start makes it, for committed."""

    def restore(self, checkpoint: tuple[int, int], lineage: int) -> None:
        """Load this verified checkpoint, or the newest before it that verifies, into live state."""

    def report_mismatch(self, plan: Plan, hashes: list[int], *, minority: bool) -> None: ...


class Former:
    """Forms one generation after another."""

    def __init__(
        self,
        key: WorkerKey,
        state: TrainingState,
        group: ProcessGroup,
        timeouts: Timeouts,
        failpoints: Failpoints,
        host: Host,
        config: Config,
    ) -> None:
        self._key = key
        self._recollect = config.env.backup == "node"
        self._state = state
        self._group = group
        self._timeouts = timeouts
        self._failpoints = failpoints
        self._host = host
        self._offsets = random.Random(f"{config.job.seed}/{key}")  # noqa: S311 - places faults, no secret

    def form(self, plan: Plan) -> Formation:
        """Form exactly this generation.

        Raises `Superseded` when a newer plan is seen on the way, `GroupBroken` when a member is
        lost, `StateMismatch` when hashes differ even after the minority took the majority's state.
        """
        member = plan.find(self._key)
        if member is None:
            raise Superseded(f"generation {plan.generation} does not list {self._key}")
        clock = _Clock()
        self._group.close()
        self._host.presence.join(plan.generation)
        with self._host.presence.waiting():
            store = self._connect(plan)
            members = self._arrive(plan, member.rank, store)
            clock.lap("arrive")
            self._build_group(plan, member.rank, store)
        self._check_newest(plan)  # a release that came during init had no sockets to shut yet
        clock.lap("group")
        with self._group.guard("forming"):
            decision = self._who_is_where(plan, member.rank, members)
            received = self._settle(plan, member.rank, members, decision)
            state_hash = self._compare(plan, member.rank, decision, received)
        clock.lap("sync")
        self._state.last_formed = plan.generation
        return Formation(
            plan=plan,
            rank=member.rank,
            decision=decision,
            source=plan.members[decision.source].key,
            contributions=contributions(plan, members, decision, recollect=self._recollect),
            state_hash=state_hash,
            received=received,
            seconds=clock.seconds,
        )

    # --- steps ------------------------------------------------------------------------------

    def _hit(self, name: str, rank: int) -> None:
        self._failpoints.hit(name, rank=rank, iteration=self._state.committed + 1)

    def _check_newest(self, plan: Plan) -> None:
        self._host.check_orders()
        newest = self._host.newest_generation()
        if newest > plan.generation:
            raise Superseded(f"generation {plan.generation} is superseded by {newest}")

    def _connect(self, plan: Plan) -> Store:
        """A client of rank 0's store, or `Superseded`."""
        self._host.set_phase("arrive")
        host, port = plan.rank0.host, plan.rank0.port
        try:
            client = storeclient.connect(
                host, port, self._timeouts.store_s, lambda: self._check_newest(plan)
            )
        except (dist.DistError, RuntimeError) as error:
            raise GroupBroken(f"store of rank 0 at {host}:{port}: {error}") from error
        return PrefixStore(f"generation/{plan.generation}", client)

    def _arrive(self, plan: Plan, rank: int, store: Store) -> tuple[Whereabouts, ...]:
        """Write our record, and wait until every member's is there or a newer plan is seen."""
        self._hit("arrive", rank)
        keys = [f"arrived/{r}" for r in range(plan.world_size)]
        try:
            store.set(keys[rank], msgspec.json.encode(self._host.whereabouts()).decode())
            while not store.check(keys):
                self._check_newest(plan)
                time.sleep(_POLL_S)
            return tuple(msgspec.json.decode(store.get(key), type=Whereabouts) for key in keys)
        except (dist.DistError, RuntimeError) as error:
            raise GroupBroken(f"store of rank 0 went away: {error}") from error

    def _build_group(self, plan: Plan, rank: int, store: Store) -> None:
        self._host.set_phase("group_init")
        iteration = self._state.committed + 1
        entry = self._failpoints.find("group_init", rank, iteration)
        if entry is not None:
            delay_s = self._offsets.uniform(0.0, _INIT_FAULT_SPREAD_S)
            threading.Timer(
                delay_s, self._failpoints.fire, (entry,), {"rank": rank, "iteration": iteration}
            ).start()
        self._group.form(
            PrefixStore("group", store),
            generation=plan.generation,
            rank=rank,
            world_size=plan.world_size,
            timeout_s=self._timeouts.group_init_s,
        )

    def _who_is_where(self, plan: Plan, rank: int, members: tuple[Whereabouts, ...]) -> Decision:
        """The first collective: everybody confirms what it decided from."""
        self._host.set_phase("who_is_where")
        self._hit("who_is_where", rank)
        mine = members[rank]
        row = torch.tensor([mine.last_formed, mine.prepared, mine.committed], dtype=torch.int64)
        rows = [
            tuple(int(x) for x in other) for other in self._group.all_gather("who_is_where", row)
        ]
        if rows != [(m.last_formed, m.prepared, m.committed) for m in members]:
            raise GroupBroken(f"members changed between arrival and first collective: {rows}")
        return decide_source(plan, members)

    def _settle(
        self, plan: Plan, rank: int, members: tuple[Whereabouts, ...], decision: Decision
    ) -> bool:
        """Bring this rank's own state to what was decided, and run the broadcast. True if it received."""
        state = self._state
        receives = rank in decision.receivers
        if receives:
            self._host.drop_rollout()
        elif decision.mode == "restore":
            self._host.drop_rollout()  # of a state that is given up
            checkpoint = members[rank].checkpoint
            if checkpoint is not None:
                self._host.restore(checkpoint, plan.lineage)
        elif decision.mode == "fresh":
            self._host.begin(plan)
        elif state.prepared == decision.iteration and state.held is not None:
            self._host.apply_held()
        elif state.dirty:
            state.roll_back()
            self._host.rolled_back()
        if decision.receivers:
            self._broadcast(rank, decision.source)
        return receives

    def _broadcast(self, rank: int, source: int) -> None:
        self._host.set_phase("broadcast")
        if rank == source:
            self._state.staging.copy_from(self._state.snapshot)
        self._hit("broadcast", rank)
        self._group.broadcast("broadcast", self._state.staging.buffer, source)

    def _compare(self, plan: Plan, rank: int, decision: Decision, received: bool) -> int:
        """Compare hashes of all ranks, then swap a received state in. The agreed hash."""
        self._host.set_phase("hash_compare")
        self._hit("hash_gather", rank)
        hashes = self._gather_hashes(received)
        self._hit("hash_compare", rank)
        if len(set(hashes)) > 1:
            voters = decision.survivors or frozenset(range(plan.world_size))
            source, minority = majority(hashes, voters)
            self._host.report_mismatch(plan, hashes, minority=rank in minority)
            if rank in minority and not received:
                self._host.drop_rollout()
                received = True
            self._broadcast(rank, source)
            hashes = self._gather_hashes(received)
            if len(set(hashes)) > 1:
                raise StateMismatch(
                    f"generation {plan.generation}: state hashes {hashes} differ after rank {source} "
                    "sent its state again"
                )
        if received:
            self._state.adopt_staging()
        return hashes[0]

    def _gather_hashes(self, received: bool) -> list[int]:
        own = self._state.staging if received else self._state.snapshot
        mine = torch.tensor([own.hash()], dtype=torch.int64)
        return [int(value) for value in self._group.all_gather("hash_compare", mine)]


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def lap(self, name: str) -> None:
        now_s = time.monotonic()
        self.seconds[name] = now_s - self._last_s
        self._last_s = now_s
