"""Values of the labels of metrics: all are known beforehand."""

from typing import Final

from rallypoint.daemon.shared.plan import CHANGE_CAUSES

PHASES: Final = ("detect", "release", "plan", "group", "sync", "envs", "first_step", "total")
BADPUT_CAUSES: Final = (
    *CHANGE_CAUSES,
    "warm_up",
    "restart",
    "quarantine",
    "checkpoint",
    "hold",
    "redone",
    "idle",
)
LOST_REASONS: Final = ("died", "dropped", "cut")
RESTART_REASONS: Final = (
    "signal",
    "error",
    "fault",
    "hang",
    "cold",
    "protocol",
    "killed",
    "spawn_failed",
    "unknown",
)
NOTICE_SOURCES: Final = ("aws", "gcp", "azure", "slurm", "kubernetes", "signal", "drill")
NOTICE_KINDS: Final = ("leave", "hint", "false")
ENV_SCOPES: Final = ("worker", "global", "deficit")
ETCD_CALLS: Final = (
    "range",
    "put",
    "delete_range",
    "txn",
    "lease_grant",
    "lease_keep_alive",
    "lease_revoke",
    "watch",
    "authenticate",
)
ETCD_ERRORS: Final = (
    "unavailable",
    "quota",
    "permission",
    "lease_expired",
    "other",
)
