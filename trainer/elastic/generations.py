"""Keeping a worker in the newest generation: entering, leaving, forming beside a rollout, holding."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.daemon.shared.timeouts import Timeouts
from rallypoint.trainer.elastic.envrows import SafePoint
from rallypoint.trainer.elastic.forming import Formation, Former
from rallypoint.trainer.elastic.group import ProcessGroup
from rallypoint.trainer.elastic.hand import CollectedRollout, RolloutInHand
from rallypoint.trainer.elastic.ledger import Ledger
from rallypoint.trainer.elastic.link import Link
from rallypoint.trainer.elastic.packet import mark_words
from rallypoint.trainer.elastic.presence import Presence
from rallypoint.trainer.elastic.protocol import Whereabouts
from rallypoint.trainer.elastic.registry import hash_text
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.errors import (
    GroupBroken,
    Left,
    RestartCold,
    StateMismatch,
    Superseded,
    TrainerError,
)

R = TypeVar("R", bound=CollectedRollout)
_WAIT_S = 0.25  # how often a wait looks whether this worker has become an orphan


class Generations(Generic[R]):
    """The half of the session that knows which generation this worker is in.

    The main thread uses it; the link's thread and the forming thread call back into it.
    """

    def __init__(
        self,
        key: WorkerKey,
        state: TrainingState,
        page: SlotPage,
        timeouts: Timeouts,
        failpoints: Failpoints,
        config: Config,
        group: ProcessGroup,
        presence: Presence,
    ) -> None:
        self.key = key
        self.state = state
        self.hand: RolloutInHand[R] = RolloutInHand()
        self.ledger = Ledger(page)
        self.group = group
        self.checkpoint: tuple[int, int] | None = None
        """Newest verified checkpoint that this worker can read: (generation, iteration)."""
        self.find_checkpoint: Callable[[], tuple[int, int] | None] | None = None
        """Looks for that checkpoint again; set by the worker."""
        self.stop_agreed = False
        self.load_checkpoint: Callable[[tuple[int, int], int], None] | None = None
        """Loads the newest checkpoint not newer than this into live state, as the beginning of this
        lineage; set by the worker."""
        self.prepare: Callable[[int], bool] | None = None
        """Whether so many env blocks can be taken over without building for long; begins to build. Set
        by the worker."""
        self.load_warm_start: Callable[[str], None] | None = None
        """Loads parameters and statistics of this checkpoint into live state; set by the worker."""
        self.presence = presence
        self._page = page
        self._mark_words = mark_words(config)
        self._failpoints = failpoints
        self._former = Former(key, state, self.group, timeouts, failpoints, self, config)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="forming")
        self._future: concurrent.futures.Future[Formation] | None = None
        self._formation: Formation | None = None
        self._formed_plan: Plan | None = None
        self._tried = 0  # newest generation that forming was begun for
        self._first_iteration = False
        self._stepped = False
        self._since_s = self._wall_s = 0.0
        self.envs_s = 0.0
        """Seconds spent on holding the planned envs, since the present generation formed."""
        self._mismatches = 0
        self._plan_seen_s: float | None = None
        self._link: Link | None = None

    # --- wiring ---------------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """Give the session its way to the supervisor."""
        self._link = link

    @property
    def link(self) -> Link:
        """The way to the supervisor."""
        if self._link is None:
            raise RuntimeError("the session has no link yet: a programming error")
        return self._link

    def on_plan(self, plan: Plan) -> None:
        """Called by the link's thread: break off whatever a generation that is over is waiting in."""
        if plan.kind == "forced":
            self._plan_seen_s = time.monotonic()
        self.group.release(before=plan.ends_below)

    def set_phase(self, phase: str) -> None:
        """Note where this worker is, for the supervisor and whoever reads the page of a dead one."""
        self.presence.phase(phase)
        self.ledger.phase(phase)

    # --- what forming needs -----------------------------------------------------------------------

    def whereabouts(self) -> Whereabouts:
        return Whereabouts(
            key=self.key,
            last_formed=self.state.last_formed,
            prepared=self.state.prepared,
            committed=self.state.committed,
            in_hand=self.hand.blocks,
            checkpoint=self.checkpoint,
        )

    def newest_generation(self) -> int:
        """Number of the newest plan seen; 0 before any."""
        plan = self.link.orders.plan
        return 0 if plan is None else plan.generation

    def drop_rollout(self) -> None:
        dropped = self.hand.drop()
        if dropped:
            self.ledger.redo("rollout")
            self.link.send(messages.StepsLost(key=self.key, reason="dropped", env_steps=dropped))

    def apply_held(self) -> None:
        self._commit("held", ({}, 0.0))

    def rolled_back(self) -> None:
        self.ledger.redo("update", "statistics")

    def begin(self, plan: Plan) -> None:
        if plan.warm_start is not None and self.load_warm_start is not None:
            self.set_phase("restore")
            with self.presence.alive():
                self.load_warm_start(plan.warm_start)
        self.state.adopt_live()

    def restore(self, checkpoint: tuple[int, int], lineage: int) -> None:
        if self.load_checkpoint is None:
            raise TrainerError(
                f"asked to restore {checkpoint}, but this worker reads no checkpoints"
            )
        self.set_phase("restore")
        with self.presence.alive():
            self.load_checkpoint(checkpoint, lineage)
        self.state.adopt_live()

    def report_mismatch(self, plan: Plan, hashes: list[int], *, minority: bool) -> None:
        """Tell of differing state hashes. Raises `RestartCold` when this rank is in the minority for
        the second time: its memory is not to be trusted."""
        self.link.send(
            messages.HashMismatch(
                key=self.key,
                generation=plan.generation,
                iteration=self.state.committed,
                hashes=tuple(hash_text(h) for h in hashes),
            )
        )
        if minority:
            self._mismatches += 1
            if self._mismatches > 1:
                raise RestartCold(
                    f"the state of {self.key} differed from the other ranks' for the second time"
                )

    # --- generations ------------------------------------------------------------------------------

    def enter(self) -> Formation:
        """The formation of the newest generation that lists this worker; blocks until it is formed.

        Raises `Left` when this worker is told to leave or has been without supervisor too long.
        """
        while True:
            if self._formation is not None:
                return self._formation
            self.check_orders()
            if self._future is None and not self._begin_forming(forced_only=False):
                self._wait_for_plan()
                continue
            self.ledger.switch("recovery" if self.state.last_formed else "warm_up")
            self._finish_forming(wait=True)

    def poll(self) -> None:
        """Called between env steps: start to form a forced generation beside the rollout."""
        if self._future is not None:
            self._finish_forming(wait=False)
            if self._future is None:
                self.set_phase("rollout")  # the phases of forming are over
        else:
            self._begin_forming(forced_only=True)

    def _begin_forming(self, *, forced_only: bool) -> bool:
        plan = self.link.orders.plan
        if plan is None or plan.generation <= self._tried or plan.find(self.key) is None:
            return False
        if forced_only and plan.kind != "forced":
            return False
        self._tried = plan.generation
        self._formation = None
        self._future = self._pool.submit(self._form, plan)
        return True

    def _form(self, plan: Plan) -> Formation:
        """In the forming thread."""
        if plan.restore and self.find_checkpoint is not None:
            with self.presence.alive():  # others may have committed since we were ready
                self.checkpoint = self.find_checkpoint()
        began_s = time.monotonic()
        formation = self._former.form(plan)
        seen_s, self._plan_seen_s = self._plan_seen_s, None
        seconds = {
            "release": began_s - seen_s if seen_s is not None else 0.0,
            "group": formation.seconds["arrive"] + formation.seconds["group"],
            "sync": formation.seconds["sync"],
        }
        self._page.put(iteration=self.state.committed)
        self.link.send(
            messages.Formed(
                key=self.key,
                generation=plan.generation,
                state_hash=hash_text(formation.state_hash),
                source=formation.source,
                iteration=self.state.committed,
                rolled_back=formation.decision.mode == "roll_back",
                seconds=seconds,
                at_s=time.monotonic(),
            )
        )
        return formation

    def _finish_forming(self, *, wait: bool) -> None:
        future = self._future
        if future is None or not (wait or future.done()):
            return
        try:
            formation = future.result()
        except Superseded:
            return
        except (GroupBroken, StateMismatch) as error:
            self._report_broken(self._tried, error)
            return
        finally:
            self._future = None
        self._formation = formation
        self._formed_plan = formation.plan
        self._first_iteration = True
        self._stepped = False
        self._since_s = time.monotonic()
        self.envs_s = 0.0

    def broken(self, error: TrainerError) -> None:
        """A collective of the present generation failed; the next `enter` forms a newer one."""
        generation = 0 if self._formation is None else self._formation.plan.generation
        self._formation = None
        self.group.release(before=self._tried + 1)
        # From where it waited in vain: a peer that fell silent was waited for within an update.
        self.ledger.recover("detect", since_ns=self.presence.waited_since_ns)
        self._report_broken(generation, error)

    def _report_broken(self, generation: int, error: TrainerError) -> None:
        plan = self.link.orders.plan
        if plan is not None and plan.ends_below > generation:
            return  # the supervisor knows already, and has decided
        self.link.send(
            messages.Broken(
                key=self.key,
                generation=generation,
                phase=self._page.read().phase,
                error=str(error),
                at_s=time.monotonic(),
                capacity_envs=getattr(error, "capacity_envs", 0),
            )
        )

    def _wait_for_plan(self) -> None:
        if self.state.last_formed:
            self.set_phase("arrive")
            self.ledger.recover("detect")
        else:
            self.set_phase("ready")
            self.ledger.switch("idle")
        self._wait(lambda: self.newest_generation() > self._tried)
        plan = self.link.orders.plan
        if plan is not None and plan.find(self.key) is None:
            self._tried = plan.generation  # not for us: wait for the next one

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises `Left` as `check_orders` does."""
        while True:
            self.check_orders()
            self.presence.touch()
            with self.link.changed:
                if self.link.changed.wait_for(condition, _WAIT_S):
                    return

    def check_orders(self) -> None:
        """Raises `Left` when this worker was told to leave, or is an orphan."""
        if self.link.orders.leave_reason is not None:
            self.ledger.switch("drain")
            raise Left(self.link.orders.leave_reason)
        if self.link.orphaned:
            raise Left("orphaned")

    def hold(self) -> None:
        """Wait, warm, for a newer plan than the present one. A stop needs no collective here: all
        members of a holding generation are at the same safe point. Raises `Left` when this worker is
        told to stop: workers of other nodes are not."""
        formation = self._formation
        if formation is None:
            return
        self.ledger.switch("hold")
        self.set_phase("holding")
        orders = self.link.orders
        self._wait(
            lambda: (
                self.newest_generation() > formation.plan.generation
                or orders.stop_reason is not None
            )
        )
        if orders.stop_reason is not None:
            raise Left("stopped")
        self._formation = None

    # --- the present generation ----------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 in none."""
        return 0 if self._formation is None else self._formation.plan.generation

    def safe_point(self, iteration: int) -> SafePoint:
        """That after this iteration, in the lineage of the newest generation formed."""
        plan = self._formed_plan
        return self.in_lineage(0 if plan is None else plan.lineage, iteration)

    def in_lineage(self, lineage: int, iteration: int) -> SafePoint:
        """That after this iteration, in this lineage of the job."""
        return SafePoint(f"{self.link.orders.job_uid}/{lineage}", iteration)

    @property
    def rank(self) -> int:
        return 0 if self._formation is None else self._formation.rank

    @property
    def world_size(self) -> int:
        return 1 if self._formation is None else self._formation.plan.world_size

    @property
    def formed_plan(self) -> Plan:
        """The plan of the newest generation that this worker trained in, also at the safe point at which
        it has left it already."""
        if self._formed_plan is None:
            raise GroupBroken("this worker has formed no generation yet")
        return self._formed_plan

    def _require_formation(self) -> Formation:
        if self._formation is None:
            raise GroupBroken("this worker is in no formed generation")
        return self._formation

    def _commit(self, how: str, spent: tuple[dict[str, float], float]) -> None:
        record = self.state.commit()
        self.hand.use()
        self._first_iteration = False
        self.stop_agreed = self.stop_agreed or record.stop
        self._page.put(iteration=record.iteration)
        self.link.send(
            messages.Committed(
                key=self.key,
                generation=record.generation,
                iteration=record.iteration,
                env_steps_total=record.env_steps_total,
                state_hash=hash_text(self.state.snapshot.hash()),
                ranks=record.ranks,
                metrics=record.metrics,
                activity=spent[0],
                redone_s=spent[1],
                wall_s=self._wall_s,
                collectives=self.group.meter.take(),
                how=how,
            )
        )

    def hit(self, failpoint: str) -> None:
        self._failpoints.hit(failpoint, rank=self.rank, iteration=self.state.committed + 1)
