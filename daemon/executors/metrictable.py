"""Every metric that the supervisor exposes, in one table: the registry and ``docs/metrics.md`` are made
from it.

Names stand without the prefix ``rallypoint_``. The trainer's figures (``rallypoint_train_…``) have
their table in `daemon.shared.figures`.
"""

from typing import Final

from rallypoint.daemon.core.records import SHOWN_JOB_STATES, WORKER_STATES
from rallypoint.daemon.executors.labels import (
    BADPUT_CAUSES,
    ENV_SCOPES,
    ETCD_CALLS,
    ETCD_ERRORS,
    LOST_REASONS,
    NOTICE_KINDS,
    NOTICE_SOURCES,
    PHASES,
    RESTART_REASONS,
)
from rallypoint.daemon.executors.metricspec import DYNAMIC, MARGINS, SECONDS, Spec
from rallypoint.daemon.shared import collectives
from rallypoint.daemon.shared.activity import ACTIVITIES, RECOVERY_PHASES
from rallypoint.daemon.shared.messages import TIERS
from rallypoint.daemon.shared.plan import CHANGE_CAUSES, CHANGE_KINDS

_JOB: Final = (
    Spec(
        "info",
        "gauge",
        "supervisor",
        "Always 1: the job and the node that this supervisor serves, and its version.",
        {"job_name": DYNAMIC, "node": DYNAMIC, "version": DYNAMIC},
    ),
    Spec(
        "job_state",
        "gauge",
        "supervisor",
        "1 for the state of the job as `rallypoint status` on this node shows it, 0 for the others.",
        {"state": SHOWN_JOB_STATES},
    ),
    Spec("generation", "gauge", "agreed", "Newest generation that formed."),
    Spec(
        "world_size",
        "gauge",
        "agreed",
        "Members of the newest formed generation; 0 before the first.",
    ),
    Spec(
        "world_size_wanted",
        "gauge",
        "agreed",
        "Workers that the newest formed generation should have: a loss does not lower it, `rallypoint "
        "scale` does; 0 before the first.",
    ),
    Spec("iteration", "gauge", "agreed", "Newest committed iteration."),
    Spec(
        "progress_age_seconds",
        "gauge",
        "supervisor",
        "Since a worker of this node committed an iteration, or since this supervisor began, by its own "
        "monotonic clock. Take the least of a job's nodes: one without a member of the generation hears "
        "of none.",
        unit="seconds",
    ),
    Spec(
        "iterations_total",
        "counter",
        "agreed",
        "Iterations committed, as workers of this node said.",
    ),
    Spec(
        "env_steps_total",
        "counter",
        "global sum",
        "Env steps that entered a committed iteration, of all ranks.",
    ),
    Spec(
        "env_steps_lost_total",
        "counter",
        "supervisor",
        "Env steps that workers of this node collected and that were never used.",
        {"reason": LOST_REASONS},
    ),
    Spec(
        "env_steps_per_second",
        "gauge",
        "global sum",
        "Env steps that entered committed iterations of the newest generation, of all ranks, over its "
        "wall time; the time of recoveries is in recovery_seconds.",
    ),
    Spec(
        "envs",
        "gauge",
        "agreed",
        "Envs of a worker (greatest), of all, and missing to the budget.",
        {"scope": ENV_SCOPES},
    ),
    Spec(
        "non_finite_total",
        "counter",
        "global sum",
        "Mini-batches that all ranks left out because a loss or gradient was not finite on some rank; "
        "counted once for the job.",
    ),
    Spec(
        "state_hash_mismatches_total",
        "counter",
        "supervisor",
        "State hashes that differed between ranks, as workers of this node reported them.",
    ),
    Spec(
        "straggler_ratio",
        "gauge",
        "global sum",
        "Seconds of the slowest rollout over those of the median one, of all ranks, in the newest "
        "iteration. Every rank waits for the slowest.",
        unit="ratio",
    ),
)
_CHANGES: Final = (
    Spec(
        "membership_changes_total",
        "counter",
        "supervisor",
        "Generations that workers of this node formed, by what caused them.",
        {"cause": CHANGE_CAUSES},
    ),
    Spec(
        "recovery_seconds",
        "histogram",
        "supervisor",
        "Time of each phase of a membership change, the longest of this node's workers; total is from "
        "notice to the first optimiser step of its last member. Where a rollout in hand is used before "
        "envs are built anew, envs has that time too, and total has not.",
        {"kind": CHANGE_KINDS, "phase": PHASES},
        unit="seconds",
        buckets=SECONDS,
    ),
    Spec(
        "recovery_age_seconds",
        "gauge",
        "supervisor",
        "Since the loss was noticed that this node has not recovered from yet: it rises while a "
        "recovery lasts; 0 while there is none.",
        unit="seconds",
    ),
    Spec(
        "last_change_seconds",
        "gauge",
        "supervisor",
        "What the newest completed change of this kind took, from notice to the first optimiser step; "
        "NaN while there was none.",
        {"kind": CHANGE_KINDS},
        unit="seconds",
    ),
    Spec(
        "last_change_age_seconds",
        "gauge",
        "supervisor",
        "Since that change was noticed; NaN while there was none.",
        {"kind": CHANGE_KINDS},
        unit="seconds",
    ),
    Spec(
        "change_stall_seconds",
        "histogram",
        "supervisor",
        "Time that each survivor of this node lost to a change of membership: from the safe point (or the "
        "loss) until it collects or updates again, however long ago the change was announced.",
        {"cause": CHANGE_CAUSES},
        unit="seconds",
        buckets=SECONDS,
    ),
)
_NOTICES: Final = (
    Spec(
        "notices_total",
        "counter",
        "supervisor",
        "Preemption notices that this supervisor heard of, by who gave them: leave (it left, or leaves), hint "
        "(it committed a checkpoint), false (the deadline is over, the machine is still there). A node that "
        "leaves may be gone before it is asked; those that stay have membership_changes_total.",
        {"source": NOTICE_SOURCES, "kind": NOTICE_KINDS},
    ),
)
_WORKERS: Final = (
    Spec("slots", "gauge", "supervisor", "Worker slots of this node."),
    Spec(
        "members",
        "gauge",
        "supervisor",
        "Slots of this node by worker state.",
        {"state": WORKER_STATES},
    ),
    Spec(
        "worker_restarts_total",
        "counter",
        "supervisor",
        "Workers started again, by how the life before ended.",
        {"reason": RESTART_REASONS},
    ),
    Spec("slot_quarantined", "gauge", "supervisor", "Slots of this node in quarantine."),
    Spec(
        "wall_seconds_total",
        "counter",
        "supervisor",
        "Seconds of this node's slots, each in exactly one activity: they add up to slots times time, "
        "with or without a worker in them. Computed at each scrape.",
        {"activity": ACTIVITIES},
        unit="seconds",
    ),
    Spec(
        "recovery_wall_seconds_total",
        "counter",
        "supervisor",
        "Those in recovery, by phase; restart: the slot has no worker because it lost one.",
        {"phase": RECOVERY_PHASES},
        unit="seconds",
    ),
    Spec(
        "badput_seconds_total",
        "counter",
        "supervisor",
        "Those that were no progress, by what caused it: a change of membership (its recovery, counted once "
        "its generation has formed; drain: leaving, too), restart, warm_up, quarantine, checkpoint, hold, "
        "idle, redone (rollout or update that was thrown away). The rest of wall_seconds_total is goodput.",
        {"cause": BADPUT_CAUSES},
        unit="seconds",
    ),
    Spec(
        "worker_rollout_seconds",
        "gauge",
        "worker",
        "Seconds of this worker's rollout in its newest iteration; no series while the slot has no "
        "worker.",
        {"slot": DYNAMIC},
        unit="seconds",
    ),
    Spec(
        "worker_update_seconds",
        "gauge",
        "worker",
        "Seconds of this worker's update in its newest iteration, the wait for others included.",
        {"slot": DYNAMIC},
        unit="seconds",
    ),
    Spec(
        "collective_seconds",
        "summary",
        "supervisor",
        "Time in each collective, the wait for slower ranks included, over all workers of this node.",
        {"name": collectives.NAMES},
        unit="seconds",
    ),
    Spec(
        "collective_bytes_total",
        "counter",
        "supervisor",
        "Bytes that the workers of this node put into each collective.",
        {"name": collectives.NAMES},
        unit="bytes",
    ),
)
_CHECKPOINTS: Final = (
    Spec(
        "checkpoint_iteration",
        "gauge",
        "agreed",
        "Iteration of the newest checkpoint; NaN while there is none.",
    ),
    Spec(
        "checkpoint_age_seconds",
        "gauge",
        "agreed",
        "Since this node heard of the newest checkpoint, by its own monotonic clock; of one that it "
        "found at its start, by the calendar. NaN while there is none.",
        unit="seconds",
    ),
    Spec(
        "checkpoint_tier_age_seconds",
        "gauge",
        "supervisor",
        "Since the newest checkpoint that this tier took from a worker of this node; NaN while there is "
        "none.",
        {"tier": TIERS},
        unit="seconds",
    ),
    Spec(
        "checkpoint_period_seconds",
        "gauge",
        "supervisor",
        "Longest of the newest five times between checkpoints that this node heard of; NaN before two.",
        unit="seconds",
    ),
    Spec(
        "checkpoint_size_bytes",
        "gauge",
        "supervisor",
        "Size of the newest checkpoint that a worker of this node wrote; NaN while there is none.",
        unit="bytes",
    ),
    Spec(
        "checkpoint_stall_seconds",
        "histogram",
        "supervisor",
        "Training time that a checkpoint took.",
        unit="seconds",
        buckets=SECONDS,
    ),
    Spec(
        "checkpoint_persist_seconds",
        "histogram",
        "supervisor",
        "From snapshot to committed manifest.",
        unit="seconds",
        buckets=SECONDS,
    ),
    Spec(
        "checkpoint_failures_total",
        "counter",
        "supervisor",
        "Checkpoints that workers of this node could not commit.",
    ),
    Spec(
        "checkpoint_tier_failures_total",
        "counter",
        "supervisor",
        "Those of them that were for this tier.",
        {"tier": TIERS},
    ),
    Spec(
        "checkpoint_passed_over_total",
        "counter",
        "supervisor",
        "Checkpoints of this tier that were due and never written: one before them took so long that a newer one "
        "took their place. Told with the next that is committed.",
        {"tier": TIERS},
    ),
)
_STORE: Final = (
    Spec("leader", "gauge", "supervisor", "1 while this node leads the job, else 0."),
    Spec(
        "store_trouble",
        "gauge",
        "supervisor",
        "1 while the membership store does not do what this node asks of it, else 0; `rallypoint status` "
        "and /readyz say why.",
    ),
    Spec(
        "lease_seconds",
        "gauge",
        "supervisor",
        "How long this node's lease holds after each renewal; NaN with embedded membership.",
        unit="seconds",
    ),
    Spec(
        "lease_margin_seconds",
        "gauge",
        "supervisor",
        "What is left of the lease now, by this node's monotonic clock; not above 0: it is over. NaN with "
        "embedded membership.",
        unit="seconds",
    ),
    Spec(
        "lease_renewal_margin_seconds",
        "histogram",
        "supervisor",
        "What was left of the lease whenever it was renewed; not above 0: too late.",
        unit="seconds",
        buckets=MARGINS,
    ),
    Spec(
        "etcd_request_seconds",
        "histogram",
        "supervisor",
        "Time of each call to etcd, all tries and endpoints included, also of one that fails; watch: "
        "until it is set up. Empty with embedded membership.",
        {"call": ETCD_CALLS},
        unit="seconds",
        buckets=SECONDS,
    ),
    Spec(
        "etcd_errors_total",
        "counter",
        "supervisor",
        "Calls to etcd that failed, after all tries.",
        {"kind": ETCD_ERRORS},
    ),
)
TABLE: Final = _JOB + _CHANGES + _NOTICES + _WORKERS + _CHECKPOINTS + _STORE
