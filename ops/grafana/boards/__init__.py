"""The dashboards that are shipped."""

from typing import Final

from rallypoint.ops.grafana.boards import checkpoints, fleet, job, recovery, training

DASHBOARDS: Final = (
    fleet.DASHBOARD,
    job.DASHBOARD,
    recovery.DASHBOARD,
    checkpoints.DASHBOARD,
    training.DASHBOARD,
)
