"""What a worker slot does with its time: always exactly one of these, so that seconds add up.

A *bucket* is an activity, or a phase of a recovery. The worker adds up its seconds by bucket on its slot's
page (`daemon.shared.slotpage`), where they survive its SIGKILL; the supervisor reads them there.
"""

from typing import Final

ACTIVITIES: Final = (
    "rollout",
    "update",
    "statistics",
    "recovery",
    "checkpoint",
    "warm_up",
    "hold",
    "drain",
    "idle",
)
PRODUCTIVE: Final = ("rollout", "update", "statistics")
"""Activities that are progress, unless what they made is thrown away."""
WORKER_PHASES: Final = ("detect", "group", "sync", "envs")
"""Phases of a recovery as a worker lives through them: until there is a plan, arriving and building the
group, bringing all to one state, holding the planned envs."""
RECOVERY_PHASES: Final = (*WORKER_PHASES, "restart")
"""And that in which a slot has no worker because it lost one."""
BUCKETS: Final = (
    *(name for name in ACTIVITIES if name != "recovery"),
    *(f"recovery/{phase}" for phase in WORKER_PHASES),
)


def bucket_of(activity: str, phase: str) -> str:
    """The bucket of an activity, in this phase of a recovery."""
    return f"recovery/{phase}" if activity == "recovery" else activity


def split(bucket: str) -> tuple[str, str]:
    """Activity and phase of a bucket; the phase is "" outside of a recovery."""
    activity, _, phase = bucket.partition("/")
    return activity, phase
