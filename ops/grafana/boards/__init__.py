"""The dashboards that are shipped."""

from typing import Final

from rallypoint.ops.grafana.boards import job

DASHBOARDS: Final = (job.DASHBOARD,)
