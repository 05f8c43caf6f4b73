"""The elastic session: iterations that commit, in whatever generation this worker is.

The training loop asks for a formed generation (`enter`), collects, updates, and ends the iteration
with `finish_iteration`. Whenever a collective cannot end it gets `GroupBroken`, says so (`broken`) and
enters again: the session rolls back, applies what is held, or takes the source's state, as the
members of the new generation decide.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.plan import Plan
from rallypoint.trainer.elastic.generations import Generations, R
from rallypoint.trainer.elastic.packet import (
    Packet,
    build_record,
    check_same_iteration,
    mark,
    of_time,
    pack,
    plan_blocks,
    unpack,
)
from rallypoint.trainer.elastic.state import CommitRecord
from rallypoint.trainer.errors import GroupBroken, Left, StateMismatch


class ElasticSession(Generations[R]):
    """One per worker; also the collectives that the algorithm sees."""

    _envs_owed = False
    """The first step of this generation was taken before the planned envs were held."""

    # --- one iteration ------------------------------------------------------------------------------

    def blocks(self) -> tuple[int, ...]:
        """Env blocks that this rank has still to collect for the iteration in progress."""
        used, in_hand = self._used(), self.hand.blocks
        return tuple(b for b in used[self._require_formation().rank] if b not in in_hand)

    def _used(self) -> tuple[tuple[int, ...], ...]:
        """Env blocks by rank whose rollouts enter the iteration in progress."""
        formation = self._require_formation()
        return formation.contributions if self._first_iteration else plan_blocks(formation.plan)

    def on_env_step(self, env_steps: int, *, halfway: bool) -> None:
        """Called after each env step of a rollout. Raises `RolloutDropped`, `Left`."""
        self._page.add("collected_env_steps", env_steps)
        self.presence.touch()
        if halfway:
            self.hit("rollout")
        self.poll()
        self.hand.stepped(env_steps)
        if self.link.orphaned:
            self.check_orders()

    def on_optimiser_step(self) -> None:
        """Called after each optimiser step; the first one of a generation ends its recovery."""
        self._page.add("optimiser_steps", 1)
        self.presence.touch()
        if not self._stepped:
            self._stepped = True
            formation = self._require_formation()
            planned = plan_blocks(formation.plan)[formation.rank]
            self._envs_owed = set(self.hand.blocks) != set(planned)
            self.link.send(
                messages.Stepped(
                    key=self.key,
                    generation=formation.plan.generation,
                    at_s=time.monotonic(),
                    envs_s=self.envs_s,
                    envs_owed=self._envs_owed,
                )
            )

    def took_envs(self, seconds: float) -> None:
        """It took so long to hold the envs of the rollout that begins. What a change costs is said once:
        with the first step, or here, where a rollout in hand was used before."""
        self.envs_s += seconds
        if self._stepped and self._envs_owed:
            self._envs_owed = False
            generation = self._require_formation().plan.generation
            self.link.send(
                messages.EnvsHeld(key=self.key, generation=generation, envs_s=self.envs_s)
            )

    def finish_iteration(
        self,
        body: Tensor,
        merge: Callable[[Sequence[Tensor]], dict[str, float]],
        *,
        env_steps: int,
        finite: bool,
    ) -> CommitRecord:
        """The last collective, the barrier, the commit. Raises `GroupBroken` or `StateMismatch`, then
        nothing is committed here (but `broken` and `enter` may yet commit it)."""
        formation = self._require_formation()
        if self._first_iteration:
            self.hit("formed_before_mark")
            self.await_formed_mark()
            self.hit("formed_after_mark")
        plan, used, orders = formation.plan, self._used(), self.link.orders
        packet = Packet(
            generation=plan.generation,
            iteration=self.state.committed + 1,
            newest_plan=self._newest_prepared(plan),
            stop=orders.stop_reason is not None,
            finite=finite,
            state_hash=self.state.live_hash(),
            env_steps=env_steps,
            cut=mark(self.hand.cut, used[formation.rank], self._mark_words),
            rollout_us=round(1e6 * self.ledger.so_far_s("rollout")),
            update_us=round(1e6 * self.ledger.so_far_s("update")),
        )
        self.set_phase("last_collective")
        self.hit("last_collective")
        rows = self.all_gather("last", pack(packet, body))
        packets, bodies = unpack(rows, self._mark_words)
        check_same_iteration(packets)
        hashes = [p.state_hash for p in packets]
        if len(set(hashes)) > 1:
            self.report_mismatch(plan, hashes, minority=False)
            raise StateMismatch(f"iteration {packet.iteration}: state hashes differ between ranks")
        figures = merge(bodies) | of_time(packets)
        record = build_record(plan, packets, used, int(self.state.env_steps), figures)
        self.state.prepare(record)
        now_s = time.monotonic()
        self._wall_s, self._since_s = now_s - self._since_s, now_s
        self.hit("prepared")
        self.set_phase("barrier")
        self.all_reduce_sum("barrier", torch.ones((), dtype=torch.int64))
        self.hit("committed")
        self.set_phase("commit")
        self._commit("barrier", self.ledger.take())
        if record.newest_plan > plan.generation and not record.stop:
            # All of this generation know that they stop, and conclude in it; newcomers of the next do not.
            self.hit("leave_generation")
            self._formation = None
        return record

    def _newest_prepared(self, present: Plan) -> int:
        """The newest plan that this worker can go over to at once. For a planned one that gives it another
        number of envs it first builds, and all train on meanwhile."""
        newest = self.link.orders.plan
        mine = None if newest is None else newest.find(self.key)
        if newest is None or mine is None or newest.kind == "forced" or self.prepare is None:
            return self.newest_generation()
        if newest.generation == present.generation or self.prepare(len(mine.blocks)):
            return newest.generation
        return present.generation

    def await_formed_mark(self) -> None:
        """Wait until ``job.formed`` is exactly the present generation: before that no iteration of it
        ends and no checkpoint of it commits. Raises `GroupBroken` when it is superseded instead."""
        generation = self._require_formation().plan.generation
        if self.link.orders.formed == generation:
            return
        self.set_phase("wait_formed")
        orders = self.link.orders
        with self.presence.waiting():
            self._wait(lambda: orders.formed >= generation or self.newest_generation() > generation)
        if orders.formed != generation:
            raise GroupBroken(f"generation {generation} is superseded before it was marked formed")

    def rest(self, seconds: float) -> None:
        """Wait before something is tried again in the present generation, at its first safe point. Raises
        `GroupBroken` when it is superseded meanwhile, `Left` when this worker is told to stop."""
        generation, orders = self._require_formation().plan.generation, self.link.orders
        until_s = time.monotonic() + seconds
        self._wait(
            lambda: (
                self.newest_generation() > generation
                or orders.stop_reason is not None
                or time.monotonic() >= until_s
            )
        )
        if orders.stop_reason is not None:
            raise Left("stopped")
        if self.newest_generation() > generation:
            raise GroupBroken(f"generation {generation} is superseded before its first commit")

    # --- collectives, as the algorithm sees them -------------------------------------------------------

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        with self.group.guard(name):
            return self.group.all_gather(name, value)

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        with self.group.guard(name):
            return self.group.all_reduce_sum(name, value)

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        with self.group.guard(name):
            end = self.group.begin_sum(name, value)

        def wait() -> Tensor:
            with self.group.guard(name):
                return end()

        return wait

    def wait_for_gradients(self) -> None:
        with self.group.guard("gradients"):
            self.group.wait_for_gradients()

    def replicated(self, module: nn.Module) -> nn.Module:
        self.set_phase("wrap")
        with self.group.guard("wrap"):
            return self.group.wrap(module)
