"""What must hold after every step, whatever happens. Each check knows the truth that no node can see."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from rallypoint.daemon.core.records import JobRecord
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.ops.simulation.endings import TRACEBACK
from rallypoint.ops.simulation.errors import Violation
from rallypoint.ops.simulation.scenario import DETECT_S, HOLDER_WAIT_S
from rallypoint.trainer.elastic.protocol import Decision

if TYPE_CHECKING:
    from rallypoint.ops.simulation.checkpoints import Checkpoint
    from rallypoint.ops.simulation.cluster import Cluster
    from rallypoint.ops.simulation.node import Node
    from rallypoint.ops.simulation.worker import Snapshot, Worker

_SLACK_S: Final = 1.5
"""For probes, back-off and the messages of a change."""


class Checks:
    """Raises `Violation` at the moment a rule is broken."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.plans: dict[int, Plan] = {}
        self.formed = 0
        self.commits = 0
        self.job = JobRecord("", "", {})
        self._leader: Node | None = None
        """Who leads, while nothing disturbs it, since `_works_since_s`."""
        self._works_since_s = 0.0
        self._registered: dict[str, tuple[tuple[int, int], float]] = {}
        """Node -> the newest checkpoint in its record, and since when that is there."""
        self._left: set[str] = set()
        """Why workers have left by agreement."""
        self._truth: dict[int, dict[int, Snapshot]] = {}
        """Branch -> iteration -> what was committed."""
        self._awaited: set[int] = set()
        """Generations that were published before anything was recorded, but not before everybody who may
        hold a local checkpoint had the time to come. What such a one registers while they form is too late."""
        self._started: dict[int, Snapshot] = {}
        """Generation -> what it began with."""
        self._live_branch = 0
        """The newest branch that has committed anything."""

    # --- plans -------------------------------------------------------------------------------------

    def published(self, plan: Plan) -> None:
        """A plan was written."""
        if self.ended:
            raise Violation("after_end", f"{self.job.state}: {self.job.reason}; then {plan}")
        newest = max(self.plans, default=0)
        if plan.generation <= newest:
            raise Violation("one_plan", f"generation {plan.generation} after {newest}: {plan}")
        scenario = self._cluster.scenario
        if not 1 <= plan.world_size <= scenario.max_workers:
            raise Violation("world_size", f"{plan.world_size} of at most {scenario.max_workers}")
        if plan.hold != (plan.world_size < scenario.min_workers):
            raise Violation("hold", f"hold is {plan.hold} with {plan.world_size} workers")
        if plan.formed != self.formed and plan.formed > self.formed:
            raise Violation("mark", f"plan says formed {plan.formed}, the job {self.formed}")
        self._check_blocks(plan)
        self._check_newcomers(plan)
        if plan.restore:
            self._check_restore(plan)
            self._check_holder(plan)
        elif plan.kind == "forced":
            self._check_need(plan)
        self.plans[plan.generation] = plan
        shared = self._cluster.scenario.shared_checkpoints
        if not (shared or self._progress) and self._lost_for_s() >= HOLDER_WAIT_S:
            self._awaited.add(plan.generation)

    def _check_blocks(self, plan: Plan) -> None:
        blocks = [b for m in plan.members for b in m.blocks]
        if len(blocks) != len(set(blocks)):
            raise Violation("blocks", f"generation {plan.generation} assigns a block twice")

    def _check_newcomers(self, plan: Plan) -> None:
        """A newcomer never ranks before a survivor, and no forced plan lets one in beside one."""
        workers = self._cluster.workers
        holds = [
            workers[m.key].last_formed >= max(1, plan.formed) and m.key in plan.survivor_keys
            for m in plan.members
        ]
        if holds != sorted(holds, reverse=True):
            raise Violation("newcomer_rank", f"a newcomer ranks before a survivor: {plan}")
        if plan.kind == "forced" and any(holds) and not all(holds):
            raise Violation("newcomer_forced", f"a forced plan lets a newcomer in: {plan}")

    def _trains_in_sight(self) -> bool:
        """Whether the newest formed generation trains, and a leader has reached all of it for a while."""
        cluster = self._cluster
        formed, group = self.plans.get(self.formed), cluster.groups.get(self.formed)
        if formed is None or group is None or not group.whole:
            return False
        now, bound_s = cluster.clock.now, 2.0 + 2 * cluster.scenario.message_s
        steady = now - cluster.linked_since_s > bound_s
        moves = now - group.last_iteration_s < 1.5 * cluster.scenario.iteration_s
        leads = [n for n in cluster.nodes if n.up and n.leading.leads and self._leased(n)]
        seen = any(all(cluster.linked(n, w.node) for w in group.here.values()) for n in leads)
        return steady and moves and seen and len(group.formed) == formed.world_size

    def _check_restore(self, plan: Plan) -> None:
        """Nothing is restored over a generation that can be seen to train; unless that was decided before,
        when nobody reached it, and only those who were to restore did not come."""
        newest = self.plans.get(max(self.plans, default=0))
        again = newest is not None and newest.restore and newest.generation > self.formed
        if self._trains_in_sight() and not again:
            text = f"generation {plan.generation} restores while {self.formed} trains"
            raise Violation("restore_over_training", text)
        self._check_survivors(plan)

    def _check_survivors(self, plan: Plan) -> None:
        """Nor while somebody lives who has the newest formed state, and could be asked: for a while."""
        cluster = self._cluster
        group, leader, now = cluster.groups.get(self.formed), cluster.leader(), cluster.clock.now
        if group is None or leader is None:
            return
        since_s = group.progress_s if group.broken_s is None else group.broken_s
        steady = now - cluster.linked_since_s > 2.0 + 2 * cluster.scenario.message_s
        if not steady or now - since_s > HOLDER_WAIT_S:
            return
        holders = [
            w
            for w in cluster.living()
            if w.last_formed >= max(1, self.formed)
            and now - w.node.state.lease_until_s <= HOLDER_WAIT_S  # as long as it is waited for
        ]
        there = [w.key for w in holders if cluster.linked(leader, w.node) and not plan.find(w.key)]
        if there:
            text = (
                f"generation {plan.generation} restores while {there} have generation {self.formed}"
            )
            raise Violation("restore_over_survivor", text)

    def _check_need(self, plan: Plan) -> None:
        """Silence of a supervisor is no reason for a change while its workers take part."""
        now, bound_s = self._cluster.clock.now, 2.0 + 2 * self._cluster.scenario.message_s
        for node in self._cluster.nodes:
            dead = not node.machine and now - node.lost_s > bound_s
            if dead and any(m.key.node == node.name for m in plan.members):
                raise Violation("silent_member", f"{plan.generation} lists workers of {node.name}")
        stood_still = plan.cause == "hang"  # and may have gone on since that was seen
        if plan.generation == self.formed + 1 and not stood_still and self._trains_in_sight():
            text = f"generation {plan.generation} is forced on {self.formed}, of which all train"
            raise Violation("needless_change", text)

    def _check_holder(self, plan: Plan) -> None:
        """Where checkpoints are local, a node that has long been ready and holds a newer one is there."""
        cluster = self._cluster
        if cluster.scenario.shared_checkpoints:
            return
        steady_s = 3.0 + 2 * cluster.scenario.message_s
        ready = [
            w
            for w in cluster.living()
            if w.ready_for_s() > steady_s and w.node.ready_long(steady_s)
        ]
        members = {m.key.node for m in plan.members}
        self._check_awaited(members)
        best = max((self._held(w.node, steady_s) for w in ready), default=(0, 0))
        there = max(self._held(n, 0.0) for n in cluster.nodes if n.name in members)
        if there < best:
            text = (
                f"generation {plan.generation} reads {there}, but {best} is on a node that is ready"
            )
            raise Violation("holder", text)

    def _check_awaited(self, members: set[str]) -> None:
        """Whoever holds the newest checkpoint that was registered gets time to come."""
        newest = self.job.checkpoint
        there = max(self._held(n, 0.0) for n in self._cluster.nodes if n.name in members)
        if newest is not None and there < newest and self._lost_for_s() < HOLDER_WAIT_S:
            text = f"{there} is read, but {newest} is registered, and its holder was not awaited"
            raise Violation("holder", text)

    def _lost_for_s(self) -> float:
        """How long the newest formed generation has been lost; without end where there is none. A group that
        is cut off trains on (DESIGN 4.2) without anybody elsewhere seeing when it moves, or breaks: who
        waits for it counts from the end of its nodes' leases."""
        group = self._cluster.groups.get(self.formed)
        if group is None:
            return math.inf
        since_s = group.progress_s if group.broken_s is None else group.broken_s
        away_s = [n.unlisted_s for n in self._cluster.nodes if group.plan.lists(n.name)]
        unseen_s = max((math.inf if s is None else s for s in away_s), default=math.inf)
        return self._cluster.clock.now - min(since_s, unseen_s)

    def look(self) -> None:
        """Once a second: a machine that has been silent for its lease and a second is in no plan any more,
        if etcd, all links and one leader have worked all the time."""
        cluster, scenario, now = self._cluster, self._cluster.scenario, self._cluster.clock.now
        leader, plan = cluster.leader(), self.plans.get(cluster.newest_generation)
        works = cluster.etcd.serves and not cluster.etcd.cut and not cluster.parts
        quick = scenario.loss == 0.0 and scenario.message_s < 0.1
        if not (works and quick and leader is not None and leader.leading.leads and leader.up):
            self._leader = None
        elif leader is not self._leader:
            self._leader, self._works_since_s = leader, now
        if self._leader is None or plan is None or self.ended:
            return
        self._check_recorded()
        survivors = [w for w in cluster.living() if w.last_formed >= max(1, self.formed)]
        if not any(plan.find(w.key) and w.node.up for w in survivors):
            return  # nobody is there to go on without it
        for node in cluster.nodes:
            silent_s = now - max(node.lost_s, self._works_since_s)
            if not node.machine and plan.lists(node.name) and silent_s > DETECT_S + 1.0 + _SLACK_S:
                text = f"{node.name} is silent for {silent_s:.1f} s, but in plan {plan.generation}"
                raise Violation("silence", text)

    def registers(self, node: str, newest: tuple[int, int] | None) -> None:
        """The newest checkpoint in this node's record, as of now; None: there is none, or no record."""
        before = self._registered.get(node)
        if newest is None:
            self._registered.pop(node, None)
        elif before is None or before[0] != newest:
            self._registered[node] = newest, self._cluster.clock.now

    def _check_recorded(self) -> None:
        """The next leader knows of every checkpoint that members have registered under this one."""
        recorded = self.job.checkpoint or (0, -1)
        for node, (newest, since_s) in self._registered.items():
            waited_s = self._cluster.clock.now - max(since_s, self._works_since_s)
            if newest > recorded and waited_s > 2 * _SLACK_S:
                text = (
                    f"{newest} is registered by {node} for {waited_s:.1f} s; recorded: {recorded}"
                )
                raise Violation("unrecorded", text)

    def _held(self, node: "Node", for_s: float) -> tuple[int, int]:
        found = self._cluster.readable(node)
        if found is None or self._cluster.clock.now - found.landed_s < for_s:
            return 0, 0
        return found.generation, found.state.iteration

    def acts_under_lease(self, node: "Node", what: str) -> None:
        """A node commits nothing and enters nothing when its lease has ended in the store."""
        if not self._leased(node):
            raise Violation("lease", f"{what} by {node.name}, whose lease is over")

    def _leased(self, node: "Node") -> bool:
        return node.lease is not None and self._cluster.etcd.keys.holds(node.lease)

    def job_written(self, job: JobRecord) -> None:
        """The job's record was written."""
        if job.formed < self.formed:
            raise Violation("mark", f"job.formed fell from {self.formed} to {job.formed}")
        if job.formed > self.formed:
            plan = self.plans[job.formed]
            if job.formed != max(self.plans):
                raise Violation("mark", f"generation {job.formed} is marked after a newer plan")
            unformed = [
                m.key
                for m in plan.members
                if self._cluster.workers[m.key].last_formed < plan.generation
            ]
            if unformed:
                raise Violation("mark", f"{job.formed} is marked, but {unformed} did not form it")
        if self.ended and (job.state, job.reason) != (self.job.state, self.job.reason):
            text = f"{self.job.state} ({self.job.reason}), then {job.state} ({job.reason})"
            raise Violation("ends_once", text)
        self.formed, self.job = job.formed, job

    @property
    def ended(self) -> bool:
        """The job's record says that it has ended."""
        return self.job.state in ("finished", "failed")

    @property
    def _progress(self) -> bool:
        """The job's record says that something has been trained."""
        return self.job.iteration > 0 or self.job.checkpoint is not None

    # --- the end ------------------------------------------------------------------------------------

    def agreed(self, worker: "Worker", reason: Literal["finished", "stopped"]) -> None:
        """A worker leaves because all agreed that the job is over."""
        scenario = self._cluster.scenario
        done = worker.state.iteration == scenario.last_iteration
        if scenario.end != reason or done != (reason == "finished"):
            text = f"{worker.key} has {reason} at {worker.state}, but the job: {scenario.end}"
            raise Violation("job_ended", text)
        self._left.add(reason)

    def job_ends(self, state: str, reason: str) -> None:
        """The leader ends the job: only if all have left by agreement, or the program has an error."""
        broken = self._cluster.scenario.end == "failed"
        if state == "failed" and broken and reason.count(TRACEBACK) == 1:
            return
        if state != "finished" or not self._left:
            raise Violation("job_ended", f"{state}: {reason}")

    def spawned(self, node: "Node", key: WorkerKey) -> None:
        """A worker is started: not by a node that knows that the job is over."""
        if node.state.ending is not None or (self.ended and node.view_job == self.job):
            raise Violation("after_end", f"{key} is started")

    def exited(self, node: "Node", code: int, reason: str) -> None:
        """A supervisor left: because it was drained or stopped, or the job is over."""
        failed, ending = self.job.state == "failed", node.state.ending
        asked = node.state.drain_cause or node.asked_to_stop
        if not (asked or self.ended or (ending is not None and ending.awaits_job)):
            raise Violation("job_ended", f"{node.name} left: {reason}")
        if not self.ended and not asked and node.cut_off_within(node.state.policy.stop_grace_s):
            node.asked_to_stop = True  # as all agreed; nobody could write it while they waited
        expected = {0, 75} if asked else {0}
        if code not in (expected | {1} if failed else expected):
            raise Violation("exit_code", f"{node.name} exits with {code}: {reason}")
        if code == 1 and reason != self.job.reason:
            raise Violation("exit_code", f"{node.name} says {reason}, the job {self.job.reason}")

    def late_exit(self, node: "Node") -> None:
        """A node is still there past the deadline that it was given."""
        raise Violation("deadline", f"{node.name} has not left in time")

    # --- states ------------------------------------------------------------------------------------

    def source_decided(self, plan: Plan, members: "Sequence[Worker]", decision: Decision) -> None:
        """A newcomer never is the source while somebody holds live state."""
        live = [w for w in members if w.last_formed >= max(1, plan.formed)]
        source = members[decision.source]
        if live and source not in live:
            raise Violation("newcomer_source", f"{source.key} is the source of {plan.generation}")
        if decision.mode == "fresh" and self._progress and plan.generation not in self._awaited:
            raise Violation("from_scratch", f"generation {plan.generation} starts from scratch")

    def restored(self, plan: Plan, found: "Checkpoint") -> None:
        """A reader took this checkpoint: it must not be of a branch that was given up."""
        shared = self._cluster.scenario.shared_checkpoints
        if shared and found.state.branch < self._live_branch:
            raise Violation(
                "stale_checkpoint",
                f"generation {plan.generation} reads {found}, but branch {self._live_branch} has "
                "committed since",
            )

    def forms(self, plan: Plan, members: "Sequence[Worker]", state: "Snapshot") -> None:
        """All have the same state, and no committed iteration is lost."""
        self._started[plan.generation] = state
        if plan.restore or plan.generation < self.formed:
            return  # one that is formed late, by workers that were cut off, is never marked: it commits nothing
        newest = max(self._truth.get(state.branch, {}), default=0)
        if state.iteration < newest and state.branch == self._live_branch:
            raise Violation(
                "committed_falls",
                f"generation {plan.generation} begins at {state.iteration} of branch {state.branch}, "
                f"which has committed {newest}",
            )

    def committed(self, plan: Plan, worker: "Worker", state: "Snapshot") -> None:
        """A rank has left the barrier of an iteration."""
        truth = self._truth.setdefault(state.branch, {})
        begun = self._started[plan.generation]
        truth.setdefault(begun.iteration, begun)  # applied by all when they formed, if it is new
        known = truth.get(state.iteration)
        if known is not None and known != state:
            raise Violation(
                "two_branches", f"{worker.key} commits {state}, but {known} is committed"
            )
        if known is None and state.iteration != max(truth) + 1:
            raise Violation("committed_falls", f"{worker.key} commits {state} after {max(truth)}")
        if plan.world_size < self._cluster.scenario.min_workers:
            raise Violation("hold", f"{plan.world_size} workers train, below min_workers")
        if self.formed < plan.generation:
            raise Violation("mark", f"{worker.key} commits in {plan.generation}, which has no mark")
        truth[state.iteration] = state
        self._live_branch = max(self._live_branch, state.branch)
        self.commits += 1

    def landed(self, checkpoint: "Checkpoint") -> None:
        """A manifest was put: what a reader prefers must be what is committed."""
        known = self._truth.get(checkpoint.state.branch, {}).get(checkpoint.state.iteration)
        if known is not None and known != checkpoint.state:
            raise Violation("two_branches", f"{checkpoint} lands, but {known} is committed")
        if checkpoint.generation > self.formed:
            raise Violation("mark", f"{checkpoint} lands before its generation is marked")
