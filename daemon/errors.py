"""Errors of the supervisor's executors that more than one of them raises or handles."""

from rallypoint.daemon.shared.errors import RallypointError


class StoreError(RallypointError):
    """The membership store refused or failed a request."""


class StoreUnavailableError(StoreError):
    """No answer in time, or the store is closed. A write may or may not have happened: read back."""


class LeaseExpiredError(StoreError):
    """The lease is unknown to the store: it expired or was revoked, and its keys are gone."""


class StorePermissionError(StoreError):
    """The store refuses this user, certificate or key."""

    exit_code = 2


class StoreQuotaError(StoreError):
    """The store is full: reads and running leases go on, nothing can be written or granted."""


class UnreadableRecordError(StoreError):
    """A key of the job holds something else than this version writes there."""

    exit_code = 2


class CompactedError(StoreError):
    """A watch asks for revisions that the store no longer has: list again, then watch from there.

    ``compact_revision`` is the oldest revision that can still be watched from.
    """

    def __init__(self, prefix: str, from_revision: int, compact_revision: int) -> None:
        self.compact_revision = compact_revision
        super().__init__(
            f"watch of {prefix!r} from revision {from_revision}: history before "
            f"{compact_revision} is compacted; list again and watch from the listing's revision + 1"
        )
